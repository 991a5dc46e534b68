// The short convolution mixer of Based (arXiv 2402.18668): depthwise over three tokens, gated.
// Activations and weights are bf16, gradients of weights f32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/types.h"

namespace sbtrain::kernels {

inline constexpr int kConvTaps = 3;
inline constexpr int kShortConvSums = kConvTaps + 2;  // of a channel: taps, bias, gate's bias

struct ShortConvWeights {
  const __nv_bfloat16* w;          // [cols, 3]
  const __nv_bfloat16* b;          // [cols]
  const __nv_bfloat16* gate_bias;  // [cols]
};

// c_t = b + w_0 u_{t-2} + w_1 u_{t-1} + w_2 u_t, where u is 0 before the document (positions count
// from 0 in each);  y_t = c_t (gate_t + gate_bias) + u_t. Source: short_conv.cu.
struct ShortConv {
  Matrix<__nv_bfloat16> y;
  Matrix<const __nv_bfloat16> u;
  Matrix<const __nv_bfloat16> gate;
  const int32_t* positions;
  int64_t rows, cols;
  ShortConvWeights w;
};
void short_conv(cudaStream_t stream, const ShortConv& p);

// du, dgate [rows, cols] = gradient; dw [cols, 3], db and dgate_bias [cols] f32 += gradient.
struct ShortConvBackward {
  Matrix<__nv_bfloat16> du;
  Matrix<__nv_bfloat16> dgate;
  float* dw;
  float* db;
  float* dgate_bias;
  Matrix<const __nv_bfloat16> dy;
  Matrix<const __nv_bfloat16> u;
  Matrix<const __nv_bfloat16> gate;
  const int32_t* positions;
  int64_t rows, cols;
  ShortConvWeights w;
  float* scratch;  // [kTokenParts, kShortConvSums * cols]
};
void short_conv_backward(cudaStream_t stream, const ShortConvBackward& p);

// One new token for each row. state [rows, 2 * cols] bf16: u of the two tokens before,
// the earlier one first; it moves on by one token.
struct ShortConvDecode {
  Matrix<__nv_bfloat16> y;
  Matrix<const __nv_bfloat16> u;
  Matrix<const __nv_bfloat16> gate;
  Matrix<__nv_bfloat16> state;
  const int32_t* positions;
  int64_t rows, cols;
  ShortConvWeights w;
};
void short_conv_decode(cudaStream_t stream, const ShortConvDecode& p);

}  // namespace sbtrain::kernels
