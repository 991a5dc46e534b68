// A barrier of all blocks of a grid, which are on the GPU at the same time: launch_together()
// promises that, or fails.
#pragma once

#include <stdexcept>
#include <string>

#include "kernels/launch.h"

namespace sbtrain::kernels {

// All threads of a block have passed a barrier of the block before one of them calls this. What
// they wrote is visible to those who see the count in wait_for_count(). Returns the count so far.
__device__ __forceinline__ int32_t add_to_count(int32_t* count) {
  int32_t before;
  asm volatile("atom.add.release.gpu.global.s32 %0, [%1], 1;\n"
               : "=r"(before)
               : "l"(count)
               : "memory");
  return before;
}

// Waits until the count is `least` or more; one thread of a block, before a barrier of the block.
__device__ __forceinline__ void wait_for_count(const int32_t* count, int32_t least) {
  int32_t now;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n" : "=r"(now) : "l"(count) : "memory");
  } while (now < least);
}

inline void check_call(const char* name, cudaError_t error) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string(name) + ": " + cudaGetErrorString(error));
}

// One block for each multiprocessor, of which each gets all its shared memory.
inline unsigned blocks_of_device(const char* name) {
  int device = 0;
  int count = 0;
  check_call(name, cudaGetDevice(&device));
  check_call(name, cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return static_cast<unsigned>(count);
}
inline size_t shared_bytes_of_block(const char* name) {
  int device = 0;
  int bytes = 0;
  check_call(name, cudaGetDevice(&device));
  check_call(name, cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return static_cast<size_t>(bytes);
}

template <typename Parameter>
void launch_together(const char* name, cudaStream_t stream, void (*kernel)(Parameter),
                     unsigned blocks, int threads, size_t shared_bytes,
                     const Parameter& parameter) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check_call(name, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(shared_bytes)));
  check_call(name, cudaLaunchKernelEx(&config, kernel, parameter));
}

}  // namespace sbtrain::kernels
