// Tensor views: a pointer, a type and a shape. A view owns nothing (see memory.h for owners).
//
// Shape suffixes used in names everywhere:
//   T tokens of the packed micro-batch   D model width   F inner (MLP) width   V vocabulary
//   H heads   d head dimension   L sequence length   B sequences   N elements
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <type_traits>

#include "kernels/types.h"

namespace sbtrain {

using DType = kernels::Type;

size_t dtype_size(DType dtype);       // bytes per element
const char* dtype_name(DType dtype);  // "f32", "bf16", ...
constexpr bool is_fp8(DType dtype) {
  return dtype == DType::kE4M3 || dtype == DType::kE5M2;
}

// A dense view of up to 4 dimensions. All dimensions but the first are contiguous;
// the first ("rows") may be strided, so that q, k and v can be column ranges of one qkv matrix.
struct Tensor {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int rank = 0;
  std::array<int64_t, 4> shape{};
  int64_t row_stride = 0;  // elements between consecutive indices of dimension 0

  Tensor() = default;
  Tensor(void* data, DType dtype, std::initializer_list<int64_t> shape);
  Tensor(void* data, DType dtype, std::span<const int64_t> shape);

  int64_t numel() const;
  size_t bytes() const { return static_cast<size_t>(numel()) * dtype_size(dtype); }
  int64_t rows() const { return shape[0]; }
  int64_t cols() const;  // elements in one row
  bool contiguous() const { return row_stride == cols(); }
  bool defined() const { return rank > 0; }

  // Rows [begin, begin + count).
  Tensor row_range(int64_t begin, int64_t count) const;
  // Columns [begin, begin + count) of a 2-d view; the result is strided.
  Tensor col_range(int64_t begin, int64_t count) const;
  // The same elements in another shape; needs a contiguous view.
  Tensor reshaped(std::initializer_list<int64_t> new_shape) const;

  // Typed access. Throws ExitCode::kInternal when the dtype differs.
  float* f32() const;
  int32_t* i32() const;
  uint16_t* bf16() const;  // raw bit patterns
  double* f64() const;
  uint8_t* fp8() const;  // raw bit patterns, of either format

  // The tensor as a member of a kernel's parameters: a pointer to its elements, or a matrix of
  // them; null if it is undefined. Throws as above.
  template <kernels::Element T>
  operator T*() const {  // NOLINT: the kernels' parameters say what they take
    if (!defined()) return nullptr;
    if constexpr (std::is_same_v<const T, const float>) {
      return f32();
    } else if constexpr (std::is_same_v<const T, const int32_t>) {
      return i32();
    } else if constexpr (std::is_same_v<const T, const double>) {
      return f64();
    } else {
      return reinterpret_cast<T*>(bf16());
    }
  }
  template <kernels::Element T>
  operator kernels::Matrix<T>() const {  // NOLINT: likewise
    return {*this, row_stride};
  }
  operator kernels::Matrix<void>() const { return {data, row_stride}; }  // NOLINT: of any type
  operator kernels::Matrix<const void>() const { return {data, row_stride}; }  // NOLINT: likewise

  std::string describe() const;  // "f32[1024, 128]"
};

}  // namespace sbtrain
