# cuDNN for softmax attention: the headers of its frontend (scripts/setup.sh fetches them) and of
# cuDNN itself. The library is loaded at run time; where it or the headers are missing, softmax
# attention runs on the portable kernels. Two variables replace the search for the headers:
#   CUDNN_FRONTEND_INCLUDE   the folder of cudnn_frontend.h
#   CUDNN_INCLUDE            the folder of cudnn.h
set(CUDNN_FRONTEND_INCLUDE "" CACHE PATH "Folder of cudnn_frontend.h; empty: look for it")
set(CUDNN_INCLUDE "" CACHE PATH "Folder of cudnn.h; empty: look for it")
set(SBTRAIN_HAS_CUDNN OFF)

# Python packages may provide both sets of headers as well.
find_program(SBTRAIN_PYTHON python3)
mark_as_advanced(SBTRAIN_PYTHON)
set(site_packages "")
if(SBTRAIN_PYTHON)
  execute_process(COMMAND ${SBTRAIN_PYTHON} -c "import sysconfig; print(sysconfig.get_path('purelib'))"
                  OUTPUT_VARIABLE site_packages OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()

# The results are not cached, so that headers fetched since the last run of CMake are found.
find_path(cudnn_frontend_found cudnn_frontend.h NO_CACHE NO_DEFAULT_PATH PATHS
  ${CUDNN_FRONTEND_INCLUDE} ${CMAKE_SOURCE_DIR}/third_party/cudnn-frontend/include
  ${site_packages}/include)
find_path(cudnn_found cudnn_version.h NO_CACHE HINTS
  ${CUDNN_INCLUDE} ${CUDAToolkit_INCLUDE_DIRS} ${site_packages}/nvidia/cudnn/include)
find_library(cudnn_library NAMES libcudnn.so.9 NO_CACHE HINTS
  ${CUDAToolkit_LIBRARY_DIR} ${CUDAToolkit_LIBRARY_ROOT}/lib ${site_packages}/nvidia/cudnn/lib)

if(cudnn_frontend_found AND cudnn_found)
  set(SBTRAIN_HAS_CUDNN ON)
  message(STATUS "cuDNN: headers in ${cudnn_found}, frontend in ${cudnn_frontend_found}")
elseif(cudnn_found)
  message(STATUS "cuDNN: its frontend's headers are missing (scripts/setup.sh cuda fetches them); "
                 "softmax attention runs on the portable kernels")
else()
  message(STATUS "cuDNN: no cudnn.h; softmax attention runs on the portable kernels")
endif()

# Compiles `source` with cuDNN where cuDNN was found. Call it in the folder of the source's target.
function(sbtrain_use_cudnn source)
  if(NOT SBTRAIN_HAS_CUDNN)
    return()
  endif()
  set(definitions SBTRAIN_HAS_CUDNN)
  if(cudnn_library)
    list(APPEND definitions SBTRAIN_CUDNN_LIBRARY="${cudnn_library}")
  endif()
  set_source_files_properties(${source} PROPERTIES
    COMPILE_DEFINITIONS "${definitions}"
    SKIP_PRECOMPILE_HEADERS ON
    # It only describes graphs to cuDNN; optimising the frontend's headers would take most of a minute.
    COMPILE_OPTIONS "-isystem${cudnn_frontend_found};-isystem${cudnn_found};-O0")
endfunction()
