// Products of few rows with a matrix, as decoding makes them: they read the whole matrix for little
// arithmetic.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/decode_sizes.h"
#include "kernels/types.h"

namespace sbtrain::kernels {

// y [rows, n] = alpha * x [rows, k] w [n, k]^T (+ residual [rows, n]); at most kFewRows rows. x and
// w are bf16, y and residual bf16 or f32. Sums are f32, and their order depends on k alone, so a
// row's bits are the same whatever the other rows are and however many. Source: few_rows.cu.
struct FewRows {
  Type type;  // of y and residual
  Matrix<void> y;
  Matrix<const __nv_bfloat16> x;
  Matrix<const __nv_bfloat16> w;
  Matrix<const void> residual;  // null: none; may be y
  int64_t rows, n, k;
  float alpha;
  bool early;  // begins before the kernel in front of it has ended (dependent_launch.cuh)
};
void few_rows(cudaStream_t stream, const FewRows& p);

}  // namespace sbtrain::kernels
