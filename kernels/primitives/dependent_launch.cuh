// Kernels that begin before the one in front of them in the stream has ended (programmatic
// dependent launch, Hopper and later): their blocks are already in place and have asked for their
// weights when the last block of that kernel leaves. Elsewhere these are plain launches.
#pragma once

#include "kernels/launch.h"

namespace sbtrain::kernels {

// The kernel that follows may begin, which then waits in wait_for_previous_kernel().
__device__ __forceinline__ void let_next_kernel_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n");
#endif
}

// Waits until all kernels before this one have ended and their writes are visible. Every thread of
// a kernel that launch_early() launches calls it before it reads or writes anything that another
// kernel writes or reads: the kernel that follows relies on it as well.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

// Asks for `bytes` bytes from global memory to be in the L2 cache soon. This is no read: it is
// right even while another kernel writes them. Both are multiples of 16; on GPUs before Hopper
// nothing happens.
__device__ __forceinline__ void prefetch_to_l2(const void* global, uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;\n" ::"l"(global), "r"(bytes) : "memory");
#endif
}

struct LaunchShape {
  dim3 grid;
  int threads;
  size_t shared_bytes = 0;  // of dynamic shared memory
};

// Whether the machine code that runs here was compiled for Hopper or later.
template <typename... Parameters>
bool compiled_for_hopper(void (*kernel)(Parameters...)) {
  cudaFuncAttributes compiled{};
  return cudaFuncGetAttributes(&compiled, kernel) == cudaSuccess && compiled.ptxVersion >= 90 &&
         compiled.binaryVersion >= 90;
}

// Launches a kernel that keeps to the rules above. It begins early only where its machine code can
// wait, and only with `early`.
template <typename... Parameters, typename... Arguments>
void launch_early(const char* name, bool early, cudaStream_t stream, void (*kernel)(Parameters...),
                  const LaunchShape& shape, const Arguments&... arguments) {
  early = early && compiled_for_hopper(kernel);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  cudaError_t error = cudaSuccess;
  if (shape.shared_bytes > 0) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shape.shared_bytes));
  }
  if (error == cudaSuccess) {
    error = cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
  }
  check_cuda(name, error);
}

}  // namespace sbtrain::kernels
