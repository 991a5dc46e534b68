// Filling, copying and adding matrices of `rows` x `cols` (ops/memory.h). Source: memory.cu.
#pragma once

#include "kernels/types.h"

namespace sbtrain::kernels {

// The value is rounded to x's type: f32, bf16, i32 or f64.
struct Fill {
  Matrix<void> x;
  Type type;
  int64_t rows, cols;
  float value;
};
// f32 and bf16 in all four combinations, i32 to i32, f64 to f64; the same type is copied bit by
// bit.
struct Copy {
  Matrix<void> y;
  Type y_type;
  Matrix<const void> x;
  Type x_type;
  int64_t rows, cols;
};
// f32 and bf16 in all four combinations.
struct Add : Copy {};
// Rows of f32 or bf16, of which row `own` is own_row [cols].
struct SumParts {
  float* y;
  Matrix<const void> x;
  const void* own_row;
  int64_t own;
  Type type;  // of x and own_row
  int64_t rows, cols;
  bool add;
};
void launch(cudaStream_t stream, const Fill& p);
void launch(cudaStream_t stream, const Copy& p);
void launch(cudaStream_t stream, const Add& p);
void launch(cudaStream_t stream, const SumParts& p);

}  // namespace sbtrain::kernels
