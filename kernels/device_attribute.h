// What the present device is able to, as launches need to know it.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>

namespace sbtrain::kernels {

// Throws std::runtime_error where CUDA has no answer.
inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0;
  int value = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, attribute, device);
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
  return value;
}

inline int multiprocessors() {
  return device_attribute(cudaDevAttrMultiProcessorCount);
}

// Bytes of shared memory that a block can have, static and dynamic together.
inline size_t most_shared_bytes() {
  return static_cast<size_t>(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
}

}  // namespace sbtrain::kernels
