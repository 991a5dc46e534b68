# NCCL for ranks that each drive a GPU: its header and library from the CUDA toolkit's folder or the
# system. SBTRAIN_HAS_NCCL says whether it is used; without it a build is complete for one GPU.
set(SBTRAIN_HAS_NCCL OFF)
if(SBTRAIN_HAS_CUDA)
  # The results are not cached, so that a library installed since the last run of CMake is found.
  find_path(nccl_include nccl.h NO_CACHE HINTS ${CUDAToolkit_INCLUDE_DIRS})
  find_library(nccl_library nccl NO_CACHE
    HINTS ${CUDAToolkit_LIBRARY_DIR} ${CUDAToolkit_LIBRARY_ROOT}/lib)
  if(nccl_include AND nccl_library)
    file(STRINGS ${nccl_include}/nccl.h nccl_version REGEX "^#define NCCL_VERSION_CODE")
    string(REGEX REPLACE "[^0-9]" "" nccl_version "${nccl_version}")
    if(nccl_version LESS 22800)
      message(STATUS "NCCL: ${nccl_include}/nccl.h is older than 2.28; a run uses one GPU")
    else()
      set(SBTRAIN_HAS_NCCL ON)
      message(STATUS "NCCL: ${nccl_library}, loaded when a run has several GPUs")
    endif()
  else()
    message(STATUS "NCCL: not found; a run uses one GPU (install libnccl-dev for more)")
  endif()
endif()
