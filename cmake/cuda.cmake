# The CUDA backend. AUTO builds it where nvcc is found; SBTRAIN_HAS_CUDA says whether it is built.
set(SBTRAIN_CUDA AUTO CACHE STRING "Build the CUDA backend: AUTO, ON or OFF")
set(SBTRAIN_HAS_CUDA OFF)

# Whether the build lacks the machine code that the attention kernels for Hopper need (src/ops/choose.cpp).
set(SBTRAIN_WITHOUT_SM90A OFF)

# What to compile the kernels for unless CMAKE_CUDA_ARCHITECTURES says it: machine code for the GPUs of this
# machine, H100 and H200, and PTX, from which the driver makes code for any other GPU since A100 when the
# program first runs there. Each architecture adds minutes to a build.
set(sbtrain_cuda_architectures 80-virtual 90a-real)
find_program(SBTRAIN_NVIDIA_SMI nvidia-smi)
mark_as_advanced(SBTRAIN_NVIDIA_SMI)
if(SBTRAIN_NVIDIA_SMI)
  execute_process(COMMAND ${SBTRAIN_NVIDIA_SMI} --query-gpu=compute_cap --format=csv,noheader
                  OUTPUT_VARIABLE capabilities OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  string(REGEX MATCHALL "[0-9]+\\.[0-9]+" capabilities "${capabilities}")
  foreach(capability IN LISTS capabilities)
    string(REPLACE "." "" capability ${capability})
    if(capability GREATER_EQUAL 80 AND NOT capability EQUAL 90)
      list(APPEND sbtrain_cuda_architectures ${capability}-real)
    endif()
  endforeach()
  list(REMOVE_DUPLICATES sbtrain_cuda_architectures)
endif()
if(NOT SBTRAIN_CUDA STREQUAL "OFF")
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    find_program(SBTRAIN_NVCC nvcc HINTS /usr/local/cuda/bin)
    if(SBTRAIN_NVCC)
      set(CMAKE_CUDA_COMPILER ${SBTRAIN_NVCC})
    endif()
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES ${sbtrain_cuda_architectures})
    endif()
    enable_language(CUDA)
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.4)
      message(FATAL_ERROR "nvcc ${CMAKE_CUDA_COMPILER_VERSION} is too old: 12.4 or later is needed, "
                          "or configure with -DSBTRAIN_CUDA=OFF")
    endif()
    find_package(CUDAToolkit REQUIRED)
    # CMake 3.25 (Debian 12) does not know nvcc's flag.
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    endif()
    # Of the code on the host, which only launches kernels: these are optimised in any case.
    set(CMAKE_CUDA_FLAGS_RELEASE "-O1 -DNDEBUG")
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    set(SBTRAIN_HAS_CUDA ON)
    if(NOT "${CMAKE_CUDA_ARCHITECTURES}" MATCHES "90a")
      set(SBTRAIN_WITHOUT_SM90A ON)
      message(STATUS "CMAKE_CUDA_ARCHITECTURES is ${CMAKE_CUDA_ARCHITECTURES}, without 90a-real: on H100 and H200 "
                     "the portable attention kernels will run, at half the speed")
    endif()
  elseif(SBTRAIN_CUDA STREQUAL "ON")
    message(FATAL_ERROR "SBTRAIN_CUDA=ON, but nvcc was not found: put it on PATH or set CUDACXX")
  endif()
endif()
