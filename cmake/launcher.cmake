# ccache, where it is installed when a build folder is first configured. The folder keeps that choice: another launcher
# is another command for every file, which would compile all of them again. -DSBTRAIN_CCACHE= (empty) does without.
if(NOT DEFINED CACHE{SBTRAIN_CCACHE})
  find_program(ccache ccache NO_CACHE)
  if(NOT ccache)
    set(ccache "")
  endif()
  set(SBTRAIN_CCACHE "${ccache}" CACHE FILEPATH "The compiler cache; empty: none")
endif()
if(SBTRAIN_CCACHE)
  # Files with a precompiled header are kept only with this sloppiness, and those of another checkout are found only
  # if paths below it count as relative.
  set(launcher ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${CMAKE_SOURCE_DIR} CCACHE_SLOPPINESS=pch_defines,time_macros
               ${SBTRAIN_CCACHE})
  foreach(language C CXX CUDA)
    set(CMAKE_${language}_COMPILER_LAUNCHER ${launcher})
  endforeach()
endif()
