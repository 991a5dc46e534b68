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
  set(CMAKE_C_COMPILER_LAUNCHER ${launcher})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${launcher})
  # nvcc says itself what it has read; otherwise ccache would let it preprocess each file twice more.
  list(INSERT launcher 3 CCACHE_DEPEND=1)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${launcher})
endif()
