// The short convolution mixer of Based (ops/short_conv.h has the formulas), of rows of `cols`
// channels. Activations and weights are bf16, gradients of weights f32; positions count from 0 in
// each document. Source: short_conv.cu.
#pragma once

#include "kernels/types.h"

namespace sbtrain::kernels {

inline constexpr int kConvTaps = 3;
inline constexpr int kShortConvSums = kConvTaps + 2;  // of a channel: taps, bias, gate's bias

struct ShortConvWeights {
  const bf16* w;              // [cols, 3]
  const bf16 *b, *gate_bias;  // [cols]
};
struct ShortConvGradients {
  float *w, *b, *gate_bias;
};
struct ShortConv {
  Matrix<bf16> y;
  Matrix<const bf16> u, gate;
  const int32_t* positions;
  ShortConvWeights w;
  int64_t rows, cols;
};
struct ShortConvBackward {
  Matrix<bf16> du, dgate;
  Matrix<const bf16> dy, u, gate;
  const int32_t* positions;
  ShortConvGradients dw;
  ShortConvWeights w;
  int64_t rows, cols;
  float* scratch = nullptr;  // [kTokenParts, kShortConvSums * cols]
};
struct ShortConvDecode {
  Matrix<bf16> y;
  Matrix<const bf16> u, gate;
  Matrix<bf16> state;  // [rows, 2 * cols]
  const int32_t* positions;
  ShortConvWeights w;
  int64_t rows, cols;
};
void launch(cudaStream_t stream, const ShortConv& p);
void launch(cudaStream_t stream, const ShortConvBackward& p);
void launch(cudaStream_t stream, const ShortConvDecode& p);

}  // namespace sbtrain::kernels
