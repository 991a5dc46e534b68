// Memory of the GPU for tests that call kernels without tensors.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "support/gpu_test.h"

namespace sbtrain::test {

inline void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

// Numbers in the device's memory. They start with all bits set: NaN, or -1.
template <typename T>
class OnDevice {
 public:
  explicit OnDevice(size_t count) : count_(count) {
    check_cuda(cudaMalloc(&data_, count * sizeof(T)));
    check_cuda(cudaMemset(data_, 0xff, count * sizeof(T)));
  }
  explicit OnDevice(const std::vector<T>& values) : OnDevice(values.size()) {
    check_cuda(cudaMemcpy(data_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() { cudaFree(data_); }
  T* data() const { return static_cast<T*>(data_); }
  // Waits for the kernels that were launched before.
  std::vector<T> values() const {
    std::vector<T> out(count_);
    check_cuda(cudaGetLastError());
    check_cuda(cudaMemcpy(out.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return out;
  }

 private:
  void* data_ = nullptr;
  size_t count_;
};

}  // namespace sbtrain::test
