// What launches throw, made in errors.cpp: in a file of kernels, <stdexcept> and <string> take as
// long to compile as all of CUDA's headers, once for each architecture and twice for the host.
#pragma once

#include <cuda_runtime_api.h>

namespace sbtrain::kernels {

// A std::runtime_error, "NAME: what CUDA says of the error".
[[noreturn]] void throw_cuda_error(const char* name, cudaError_t error);
// A std::invalid_argument and a std::runtime_error, with a message in the format of printf().
[[noreturn, gnu::format(printf, 1, 2)]] void throw_invalid_argument(const char* format, ...);
[[noreturn, gnu::format(printf, 1, 2)]] void throw_runtime_error(const char* format, ...);

inline void check_cuda(const char* name, cudaError_t error) {
  if (error != cudaSuccess) throw_cuda_error(name, error);
}

}  // namespace sbtrain::kernels
