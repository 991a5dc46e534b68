// Filling, copying and adding matrices.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/types.h"

namespace sbtrain::kernels {

// x [rows, cols] = value, rounded to x's type. Source: memory.cu.
struct Fill {
  void* x;
  Type type;
  int64_t rows, cols, stride;  // stride: elements from row to row
  float value;
};
void fill(cudaStream_t stream, const Fill& p);

// y [rows, cols] = x [rows, cols]. f32 and bf16 in all four combinations, i32 to i32, f64 to
// f64; the same type is copied bit by bit.
struct Copy {
  void* y;
  Type y_type;
  int64_t y_stride;
  const void* x;
  Type x_type;
  int64_t x_stride;
  int64_t rows, cols;
};
void copy(cudaStream_t stream, const Copy& p);

// y [rows, cols] += x [rows, cols], f32 and bf16 in all four combinations.
void add(cudaStream_t stream, const Copy& p);

}  // namespace sbtrain::kernels
