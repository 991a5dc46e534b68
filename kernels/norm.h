// RMSNorm, LayerNorm and head norm. Activations, their gradients and weights are bf16, gradients of
// weights f32; strides are elements from row to row. Statistics are f32 and recomputed from x.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace sbtrain::kernels {

// The widest row that RMSNorm and LayerNorm take, and the largest head of head norm (a scalar path
// serves rows that cannot be read 16 bytes at a time). Beyond: std::invalid_argument.
inline constexpr int64_t kMaxNormWidth = 16384;
inline constexpr int64_t kMaxHeadDim = 512;
inline constexpr int64_t kMaxScalarHeadDim = 256;

// y [rows, cols] = x / sqrt(mean(x^2) + eps) * w, w [cols] (arXiv 1910.07467). Source: norm.cu.
struct RmsNorm {
  __nv_bfloat16* y;
  int64_t y_stride;
  const __nv_bfloat16* x;
  int64_t x_stride;
  const __nv_bfloat16* w;
  int64_t rows, cols;
  float eps;
};
void rmsnorm(cudaStream_t stream, const RmsNorm& p);

// dx [rows, cols] += gradient, dw [cols] f32 += gradient.
struct RmsNormBackward {
  __nv_bfloat16* dx;
  int64_t dx_stride;
  float* dw;
  const __nv_bfloat16* dy;
  int64_t dy_stride;
  const __nv_bfloat16* x;
  int64_t x_stride;
  const __nv_bfloat16* w;
  int64_t rows, cols;
  float eps;
  float* scratch;  // [kTokenParts, cols]
};
void rmsnorm_backward(cudaStream_t stream, const RmsNormBackward& p);

// y [rows, cols] = (x - mean) / sqrt(var + eps) * w + b, w and b [cols] (arXiv 1607.06450).
struct LayerNorm {
  __nv_bfloat16* y;
  int64_t y_stride;
  const __nv_bfloat16* x;
  int64_t x_stride;
  const __nv_bfloat16* w;
  const __nv_bfloat16* b;
  int64_t rows, cols;
  float eps;
};
void layernorm(cudaStream_t stream, const LayerNorm& p);

// dx [rows, cols] = gradient, or += with accumulate; dw, db [cols] f32 += gradient. dx may be dy.
struct LayerNormBackward {
  __nv_bfloat16* dx;
  int64_t dx_stride;
  float* dw;
  float* db;
  const __nv_bfloat16* dy;
  int64_t dy_stride;
  const __nv_bfloat16* x;
  int64_t x_stride;
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
  __nv_bfloat16* y;
  int64_t y_stride;
  const __nv_bfloat16* x;
  int64_t x_stride;
  const __nv_bfloat16* w;
  const __nv_bfloat16* b;
  int64_t rows;
  int heads, head_dim;
  float eps;
};
void head_norm(cudaStream_t stream, const HeadNorm& p);

// dx [rows, heads * head_dim] = gradient; dw, db [heads * head_dim] f32 += gradient.
struct HeadNormBackward {
  __nv_bfloat16* dx;
  int64_t dx_stride;
  float* dw;
  float* db;
  const __nv_bfloat16* dy;
  int64_t dy_stride;
  const __nv_bfloat16* x;
  int64_t x_stride;
  const __nv_bfloat16* w;
  int64_t rows;
  int heads, head_dim;
  float eps;
  float* scratch;  // [kTokenParts, 2 * heads * head_dim]
};
void head_norm_backward(cudaStream_t stream, const HeadNormBackward& p);

}  // namespace sbtrain::kernels
