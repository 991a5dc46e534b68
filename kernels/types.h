// What kernels see of tensors and streams. Headers of kernels need no header of CUDA, so that a
// memory plan without a GPU can ask them for the scratch that a kernel takes.
#pragma once

#include <cstdint>
#include <type_traits>

struct CUstream_st;
struct __nv_bfloat16;               // NOLINT(bugprone-reserved-identifier)
using cudaStream_t = CUstream_st*;  // as CUDA declares it

namespace sbtrain::kernels {

using bf16 = __nv_bfloat16;

// Element types. A kernel says which of them it takes. E4M3 and E5M2 are the fp8 formats of
// arXiv 2209.05433: 4 or 5 bits of exponent, 3 or 2 of mantissa.
enum class Type : uint8_t { kF32, kBF16, kI32, kF64, kI64, kU8, kE4M3, kE5M2 };

// Those that parameters of kernels point to.
template <typename T, typename... Others>
inline constexpr bool kOneOf = (std::is_same_v<const T, const Others> || ...);
template <typename T>
concept Element = (kOneOf<T, float, bf16, int32_t, double>);

// Rows of a matrix in the device's memory.
template <typename T>
struct Matrix {
  T* data = nullptr;
  int64_t stride = 0;  // elements from row to row
  constexpr T* row(int64_t i) const { return data + i * stride; }
  constexpr explicit operator bool() const { return data != nullptr; }
  // The matrix that begins at element (row, column).
  constexpr Matrix from(int64_t row, int64_t column) const {
    return {data + row * stride + column, stride};
  }
};

}  // namespace sbtrain::kernels
