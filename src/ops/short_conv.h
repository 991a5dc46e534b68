// The short convolution mixer of Based (arXiv 2402.18668), between its projection and its output:
//   c_t = b + sum_k w_k u_{t-2+k}, k = 0, 1, 2 (depthwise; tokens before the document are 0)
//   y_t = c_t * (gate_t + gate_bias) + u_t
#pragma once

#include "ops/ops.h"

namespace sbtrain::ops {

inline constexpr int kShortConv = 3;  // taps

struct ShortConvWeights {
  Tensor w_D3, b_D, gate_bias_D;
};
struct ShortConvForward {
  Tensor y_TD;
  Tensor u_TD, gate_TD;
  Tensor positions_T;
};
struct ShortConvBackward {
  Tensor du_TD, dgate_TD;  // =
  Tensor dy_TD;
  Tensor u_TD, gate_TD;
  Tensor positions_T;
};
void short_conv_forward(Stream& s, const ShortConvForward& t, const ShortConvWeights& w);
// dw += gradients of w.
void short_conv_backward(Stream& s, const ShortConvBackward& t, const ShortConvWeights& dw,
                         const ShortConvWeights& w);
// One new token for each of B sequences. state [B, 2D] holds the inputs of the two tokens before
// it, the earlier one first, and is moved on; at positions 0 and 1 what is missing counts as 0.
struct ShortConvDecode {
  Tensor y_BD;
  Tensor u_BD, gate_BD;
  Tensor state_B2D;
  Tensor positions_B;
};
void short_conv_decode(Stream& s, const ShortConvDecode& t, const ShortConvWeights& w);

}  // namespace sbtrain::ops
