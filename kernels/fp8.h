// Casts to fp8 with one scale a matrix (ops/fp8.h). Source: fp8.cu.
#pragma once

#include "kernels/types.h"

namespace sbtrain::kernels {

// x is f32 or bf16, rows x cols. *amax is the bit pattern of a nonnegative f32, or of NaN.
struct Amax {
  float* amax;
  Matrix<const void> x;
  Type x_type;
  int64_t rows, cols;
};

// y [rows, cols] and y_t [cols, rows] are fp8 of `type`; one of them may be null.
struct CastFp8 {
  Matrix<void> y;
  Matrix<void> y_t;
  Type type;
  float* inverse_scale;
  Matrix<const void> x;
  Type x_type;
  const float* amax;
  int64_t rows, cols;
};

// x [rows, cols] are bit patterns of nonnegative numbers, or of NaN; amax [cols] and inverse_scale
// [cols, 1].
struct Fp8Scales {
  float* amax;
  Matrix<float> inverse_scale;
  Matrix<const float> x;
  int64_t rows, cols;
};

// y [cols, rows] and x [rows, cols] have elements of one byte.
struct TransposeFp8 {
  Matrix<void> y;
  Matrix<const void> x;
  int64_t rows, cols;
};

void launch(cudaStream_t stream, const Amax& p);
void launch(cudaStream_t stream, const CastFp8& p);
void launch(cudaStream_t stream, const Fp8Scales& p);
void launch(cudaStream_t stream, const TransposeFp8& p);

}  // namespace sbtrain::kernels
