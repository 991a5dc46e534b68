// Heads of keys and values that several heads of queries share (grouped-query attention,
// ops/heads.h).
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/types.h"

namespace sbtrain::kernels {

// y [rows, heads * head_dim]: head h = head h / (heads / groups) of x [rows, groups * head_dim].
// Source: heads.cu.
struct RepeatHeads {
  Matrix<__nv_bfloat16> y;
  Matrix<const __nv_bfloat16> x;
  int64_t rows;
  int heads, groups, head_dim;
};
void repeat_heads(cudaStream_t stream, const RepeatHeads& p);

// dx [rows, groups * head_dim]: head g = the sum of the heads of dy [rows, heads * head_dim] that
// read it, in their order, in f32.
struct RepeatHeadsBackward {
  Matrix<__nv_bfloat16> dx;
  Matrix<const __nv_bfloat16> dy;
  int64_t rows;
  int heads, groups, head_dim;
};
void repeat_heads_backward(cudaStream_t stream, const RepeatHeadsBackward& p);

}  // namespace sbtrain::kernels
