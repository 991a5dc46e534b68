// One matrix product in row-major terms.
#pragma once

#include "ops/cuda/context.h"

namespace sbtrain::ops::cuda {

// y[M, N] = alpha * a b + beta * c, where a is [M, K] (or, transposed, [K, M]) and b is [K, N] (or
// [N, K]). a and b are bf16; y and c share a type, bf16 or f32. Rows may be strided; nothing is
// copied. `workspace` is linear_workspace().
struct Gemm {
  Tensor y, a, b;
  bool transpose_a = false, transpose_b = false;
  float alpha = 1, beta = 0;
  Tensor c{};  // y itself if undefined
};
void gemm(Stream& s, const Gemm& g, const Tensor& workspace);

}  // namespace sbtrain::ops::cuda
