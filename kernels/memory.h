// Filling, copying and adding matrices.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/types.h"

namespace sbtrain::kernels {

// x [rows, cols] = value, rounded to x's type. Source: memory.cu.
struct Fill {
  Matrix<void> x;
  Type type;
  int64_t rows, cols;
  float value;
};
void fill(cudaStream_t stream, const Fill& p);

// y [rows, cols] = x [rows, cols]. f32 and bf16 in all four combinations, i32 to i32, f64 to
// f64; the same type is copied bit by bit.
struct Copy {
  Matrix<void> y;
  Type y_type;
  Matrix<const void> x;
  Type x_type;
  int64_t rows, cols;
};
void copy(cudaStream_t stream, const Copy& p);

// y [rows, cols] += x [rows, cols], f32 and bf16 in all four combinations.
void add(cudaStream_t stream, const Copy& p);

// y [cols] (f32) = the sum of the rows of x [rows, cols] (f32 or bf16), in their order; += if
// `add`. y does not overlap x.
struct SumRows {
  float* y;
  Matrix<const void> x;
  Type x_type;
  int64_t rows, cols;
  bool add;
};
void sum_rows(cudaStream_t stream, const SumRows& p);

}  // namespace sbtrain::kernels
