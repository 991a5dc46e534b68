// What the present device is able to, as launches need to know it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/errors.h"

namespace sbtrain::kernels {

// Throws std::runtime_error where CUDA has no answer.
inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0;
  int value = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, attribute, device);
  check_cuda("attribute of the device", error);
  return value;
}

inline int multiprocessors() {
  return device_attribute(cudaDevAttrMultiProcessorCount);
}

// A little less than half of them, in eights: 64 of the 132 of an H200.
inline int64_t half_of_multiprocessors() {
  return multiprocessors() / 16 * 8;
}

// Bytes of which one can expect that they stay in the L2 cache while all multiprocessors read them:
// two fifths of it, 24 of the 60 MiB of an H200. What multiprocessors on both sides of the chip
// read is in both halves of the cache, and a fifth of a half is left to what passes through.
inline int64_t resident_cache_bytes() {
  return int64_t{2} * device_attribute(cudaDevAttrL2CacheSize) / 5;
}

// Bytes of shared memory that a block can have, static and dynamic together.
inline size_t most_shared_bytes() {
  return static_cast<size_t>(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
}

}  // namespace sbtrain::kernels
