// What kernels see of tensors: element types and matrices.
#pragma once

#include <cstdint>

namespace sbtrain::kernels {

enum class Type : uint8_t { kF32, kBF16, kI32, kF64 };

// Rows of a matrix in the device's memory.
template <typename T>
struct Matrix {
  T* data = nullptr;
  int64_t stride = 0;  // elements from row to row
  constexpr T* row(int64_t i) const { return data + i * stride; }
};

}  // namespace sbtrain::kernels
