// The short convolution mixer of Based (arXiv 2402.18668), between its projection and its output:
//   c_t = b + sum_k w_k u_{t-2+k}, k = 0, 1, 2 (depthwise; tokens before the document are 0)
//   y_t = c_t * (gate_t + gate_bias) + u_t
#pragma once

#include "kernels/short_conv.h"
#include "ops/scratch.h"

namespace sbtrain::ops {

inline constexpr int kShortConv = kernels::kConvTaps;

struct ShortConvWeights {
  Tensor w_D3, b_D, gate_bias_D;
  operator kernels::ShortConvWeights() const { return {w_D3, b_D, gate_bias_D}; }    // NOLINT
  operator kernels::ShortConvGradients() const { return {w_D3, b_D, gate_bias_D}; }  // NOLINT
};

inline void check_short_conv(const Check& c, const Tensor& u_TD, const Tensor& gate_TD,
                             const Tensor& positions_T, const ShortConvWeights& w, DType weights) {
  c.matrix("u_TD", u_TD);
  c.same("gate_TD", gate_TD, u_TD);
  c.flat("positions_T", positions_T, u_TD.rows(), DType::kI32);
  c.flat("w_D3", w.w_D3, kShortConv * u_TD.cols(), weights);
  c.flat("b_D", w.b_D, u_TD.cols(), weights);
  c.flat("gate_bias_D", w.gate_bias_D, u_TD.cols(), weights);
}

struct ShortConvForward {
  static constexpr std::string_view kName = "short_conv_forward";
  Tensor y_TD;
  Tensor u_TD, gate_TD;
  Tensor positions_T;
  ShortConvWeights w{};
  void check() const {
    check_short_conv(Check(kName), u_TD, gate_TD, positions_T, w, u_TD.dtype);
    Check(kName).same("y_TD", y_TD, u_TD);
  }
  kernels::ShortConv kernel() const {
    return {y_TD, u_TD, gate_TD, positions_T, w, u_TD.rows(), u_TD.cols()};
  }
};

struct ShortConvBackward {
  static constexpr std::string_view kName = "short_conv_backward";
  Tensor du_TD, dgate_TD;  // =
  Tensor dy_TD;
  Tensor u_TD, gate_TD;
  Tensor positions_T;
  ShortConvWeights dw{};  // +=
  ShortConvWeights w{};
  void check() const {
    check_short_conv(Check(kName), u_TD, gate_TD, positions_T, w, u_TD.dtype);
    check_short_conv(Check(kName), du_TD, dgate_TD, positions_T, dw, DType::kF32);
    Check(kName).same("dy_TD", dy_TD, u_TD);
    Check(kName).same("du_TD", du_TD, u_TD);
  }
  Buffer scratch(const Stream& s) const {
    return token_partials(s, kernels::kShortConvSums * u_TD.cols());
  }
  kernels::ShortConvBackward kernel() const {
    return {du_TD, dgate_TD, dy_TD, u_TD, gate_TD, positions_T, dw, w, u_TD.rows(), u_TD.cols()};
  }
};

// One new token for each of B sequences. state [B, 2D] holds the inputs of the two tokens before
// it, the earlier one first, and moves on by one token; missing inputs (positions 0 and 1) are 0.
struct ShortConvDecode {
  static constexpr std::string_view kName = "short_conv_decode";
  Tensor y_BD;
  Tensor u_BD, gate_BD;
  Tensor state_B2D;
  Tensor positions_B;
  ShortConvWeights w{};
  void check() const {
    check_short_conv(Check(kName), u_BD, gate_BD, positions_B, w, u_BD.dtype);
    Check(kName).same("y_BD", y_BD, u_BD);
    Check(kName).matrix("state_B2D", state_B2D, u_BD.rows(), 2 * u_BD.cols(), u_BD.dtype);
  }
  kernels::ShortConvDecode kernel() const {
    return {y_BD, u_BD, gate_BD, state_B2D, positions_B, w, u_BD.rows(), u_BD.cols()};
  }
};

namespace cpu {
void run(Cpu, Stream& s, const ShortConvForward& op);
void run(Cpu, Stream& s, const ShortConvBackward& op, const Buffer& scratch);
void run(Cpu, Stream& s, const ShortConvDecode& op);
}  // namespace cpu

}  // namespace sbtrain::ops
