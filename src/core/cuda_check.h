// Errors of CUDA's runtime as exceptions. Only files of a build with CUDA include this.
#pragma once

#include <cuda_runtime_api.h>

#include "core/error.h"

namespace sbtrain {

// Unless the call succeeded, clears the runtime's last error, which would otherwise be reported by
// a later call, and throws ExitCode::kOutOfMemory where memory was short, else kInternal, with the
// call and the reason.
inline void check_cuda(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  fail(error == cudaErrorMemoryAllocation ? ExitCode::kOutOfMemory : ExitCode::kInternal,
       "CUDA: {} failed: {}", call, cudaGetErrorString(error));
}

#define SBTRAIN_CUDA_CHECK(call) ::sbtrain::check_cuda((call), #call)

}  // namespace sbtrain
