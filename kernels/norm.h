// RMSNorm, LayerNorm, and their forms for heads. Activations, their gradients and weights are bf16,
// gradients of weights f32. Statistics are f32 and recomputed from x.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/limits.h"
#include "kernels/types.h"

namespace sbtrain::kernels {

// y [rows, cols] = x / sqrt(mean(x^2) + eps) * w, w [cols] (arXiv 1910.07467). Source: norm.cu.
struct RmsNorm {
  Matrix<__nv_bfloat16> y;
  Matrix<const __nv_bfloat16> x;
  const __nv_bfloat16* w;
  int64_t rows, cols;
  float eps;
  bool early = false;  // begins before the kernel in front of it has ended (dependent_launch.cuh)
};
void rmsnorm(cudaStream_t stream, const RmsNorm& p);

// dx [rows, cols] += gradient; dw [cols] f32 += gradient, or = without accumulate_dw.
struct RmsNormBackward {
  Matrix<__nv_bfloat16> dx;
  float* dw;
  Matrix<const __nv_bfloat16> dy;
  Matrix<const __nv_bfloat16> x;
  const __nv_bfloat16* w;
  int64_t rows, cols;
  float eps;
  bool accumulate_dw;
  float* scratch;      // [kTokenParts, cols]
  bool early = false;  // of the two kernels, the second begins early (dependent_launch.cuh)
};
void rmsnorm_backward(cudaStream_t stream, const RmsNormBackward& p);

// y [rows, cols] = (x - mean) / sqrt(var + eps) * w + b, w and b [cols] (arXiv 1607.06450).
struct LayerNorm {
  Matrix<__nv_bfloat16> y;
  Matrix<const __nv_bfloat16> x;
  const __nv_bfloat16* w;
  const __nv_bfloat16* b;
  int64_t rows, cols;
  float eps;
};
void layernorm(cudaStream_t stream, const LayerNorm& p);

// dx [rows, cols] = gradient, or += with accumulate; dw, db [cols] f32 += gradient. dx may be dy.
struct LayerNormBackward {
  Matrix<__nv_bfloat16> dx;
  float* dw;
  float* db;
  Matrix<const __nv_bfloat16> dy;
  Matrix<const __nv_bfloat16> x;
  const __nv_bfloat16* w;
  int64_t rows, cols;
  float eps;
  bool accumulate;
  float* scratch;  // [kTokenParts, 2 * cols]
};
void layernorm_backward(cudaStream_t stream, const LayerNormBackward& p);

// For each row and head, over the head_dim channels:
// y [rows, heads * head_dim] = (x - mean) / sqrt(var + eps) * w + b, w and b [heads * head_dim].
struct HeadNorm {
  Matrix<__nv_bfloat16> y;
  Matrix<const __nv_bfloat16> x;
  const __nv_bfloat16* w;
  const __nv_bfloat16* b;
  int64_t rows;
  int heads, head_dim;
  float eps;
};
void head_norm(cudaStream_t stream, const HeadNorm& p);

// dx [rows, heads * head_dim] = gradient; dw, db [heads * head_dim] f32 += gradient.
struct HeadNormBackward {
  Matrix<__nv_bfloat16> dx;
  float* dw;
  float* db;
  Matrix<const __nv_bfloat16> dy;
  Matrix<const __nv_bfloat16> x;
  const __nv_bfloat16* w;
  int64_t rows;
  int heads, head_dim;
  float eps;
  float* scratch;  // [kTokenParts, 2 * heads * head_dim]
};
void head_norm_backward(cudaStream_t stream, const HeadNormBackward& p);

// For each row and head, over the head_dim channels:
// y [rows, heads * head_dim] = x / sqrt(mean(x^2) + eps) * w, w [head_dim].
struct HeadRmsNorm {
  Matrix<__nv_bfloat16> y;
  Matrix<const __nv_bfloat16> x;
  const __nv_bfloat16* w;
  int64_t rows;
  int heads, head_dim;
  float eps;
};
void head_rmsnorm(cudaStream_t stream, const HeadRmsNorm& p);

// dx [rows, heads * head_dim] = gradient, dw [head_dim] f32 += gradient. dx may be dy.
struct HeadRmsNormBackward {
  Matrix<__nv_bfloat16> dx;
  float* dw;
  Matrix<const __nv_bfloat16> dy;
  Matrix<const __nv_bfloat16> x;
  const __nv_bfloat16* w;
  int64_t rows;
  int heads, head_dim;
  float eps;
  float* scratch;  // [kTokenParts, head_dim]
};
void head_rmsnorm_backward(cudaStream_t stream, const HeadRmsNormBackward& p);

}  // namespace sbtrain::kernels
