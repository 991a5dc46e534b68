// LayerNorm, biases, GELU and the short convolution: checks their tensors, then runs them on the
// stream's backend.
#include "ops/check.h"
#include "ops/cpu/cpu.h"
#include "ops/cuda/cuda.h"
#include "ops/scratch.h"

namespace sbtrain::ops {
namespace {

constexpr DType kF32 = DType::kF32;

void check_short_conv(std::string_view op, const Tensor& u_TD, const Tensor& gate_TD,
                      const Tensor& positions_T, const ShortConvWeights& w) {
  check_matrix(op, "u_TD", u_TD, kF32, u_TD.rows(), u_TD.cols());
  check_same_shape(op, "gate_TD", gate_TD, u_TD);
  check_flat(op, "positions_T", positions_T, DType::kI32, u_TD.rows());
  check_flat(op, "w_D3", w.w_D3, kF32, kShortConv * u_TD.cols());
  check_flat(op, "b_D", w.b_D, kF32, u_TD.cols());
  check_flat(op, "gate_bias_D", w.gate_bias_D, kF32, u_TD.cols());
}

}  // namespace

void layernorm(Stream& s, Tensor y_TD, Tensor x_TD, Tensor w_D, Tensor b_D, float eps) {
  check_matrix("layernorm", "x_TD", x_TD, kF32, x_TD.rows(), x_TD.cols());
  check_same_shape("layernorm", "y_TD", y_TD, x_TD);
  check_flat("layernorm", "w_D", w_D, kF32, x_TD.cols());
  check_flat("layernorm", "b_D", b_D, kF32, x_TD.cols());
  dispatch(
      s, "layernorm", [&] { cpu::layernorm(s, y_TD, x_TD, w_D, b_D, eps); },
      [&] { cuda::layernorm(s, y_TD, x_TD, w_D, b_D, eps); });
}

void layernorm_backward(Stream& s, Tensor dx_TD, Tensor dw_D, Tensor db_D, Tensor dy_TD,
                        Tensor x_TD, Tensor w_D, float eps, bool accumulate) {
  constexpr std::string_view kOp = "layernorm_backward";
  check_matrix(kOp, "x_TD", x_TD, kF32, x_TD.rows(), x_TD.cols());
  check_same_shape(kOp, "dx_TD", dx_TD, x_TD);
  check_same_shape(kOp, "dy_TD", dy_TD, x_TD);
  for (const Tensor* row : {&w_D, &dw_D, &db_D}) check_flat(kOp, "w_D", *row, kF32, x_TD.cols());
  dispatch(
      s, kOp,
      [&] { cpu::layernorm_backward(s, dx_TD, dw_D, db_D, dy_TD, x_TD, w_D, eps, accumulate); },
      [&] { cuda::layernorm_backward(s, dx_TD, dw_D, db_D, dy_TD, x_TD, w_D, eps, accumulate); },
      [&] { token_partials(s, 2 * x_TD.cols()); });
}

void add_bias(Stream& s, Tensor y_TN, Tensor b_N) {
  check_matrix("add_bias", "y_TN", y_TN, kF32, y_TN.rows(), y_TN.cols());
  check_flat("add_bias", "b_N", b_N, kF32, y_TN.cols());
  dispatch(
      s, "add_bias", [&] { cpu::add_bias(s, y_TN, b_N); }, [&] { cuda::add_bias(s, y_TN, b_N); });
}

void bias_gelu(Stream& s, Tensor y_TF, Tensor x_TF, Tensor b_F) {
  check_matrix("bias_gelu", "x_TF", x_TF, kF32, x_TF.rows(), x_TF.cols());
  check_same_shape("bias_gelu", "y_TF", y_TF, x_TF);
  check_flat("bias_gelu", "b_F", b_F, kF32, x_TF.cols());
  dispatch(
      s, "bias_gelu", [&] { cpu::bias_gelu(s, y_TF, x_TF, b_F); },
      [&] { cuda::bias_gelu(s, y_TF, x_TF, b_F); });
}

void bias_gelu_backward(Stream& s, Tensor dx_TF, Tensor dy_TF, Tensor x_TF, Tensor b_F) {
  constexpr std::string_view kOp = "bias_gelu_backward";
  check_matrix(kOp, "x_TF", x_TF, kF32, x_TF.rows(), x_TF.cols());
  check_same_shape(kOp, "dx_TF", dx_TF, x_TF);
  check_same_shape(kOp, "dy_TF", dy_TF, x_TF);
  check_flat(kOp, "b_F", b_F, kF32, x_TF.cols());
  dispatch(
      s, kOp, [&] { cpu::bias_gelu_backward(s, dx_TF, dy_TF, x_TF, b_F); },
      [&] { cuda::bias_gelu_backward(s, dx_TF, dy_TF, x_TF, b_F); });
}

void short_conv_forward(Stream& s, const ShortConvForward& t, const ShortConvWeights& w) {
  constexpr std::string_view kOp = "short_conv_forward";
  check_short_conv(kOp, t.u_TD, t.gate_TD, t.positions_T, w);
  check_same_shape(kOp, "y_TD", t.y_TD, t.u_TD);
  dispatch(
      s, kOp, [&] { cpu::short_conv_forward(s, t, w); },
      [&] { cuda::short_conv_forward(s, t, w); });
}

void short_conv_backward(Stream& s, const ShortConvBackward& t, const ShortConvWeights& dw,
                         const ShortConvWeights& w) {
  constexpr std::string_view kOp = "short_conv_backward";
  check_short_conv(kOp, t.u_TD, t.gate_TD, t.positions_T, w);
  check_short_conv(kOp, t.du_TD, t.dgate_TD, t.positions_T, dw);
  check_same_shape(kOp, "dy_TD", t.dy_TD, t.u_TD);
  check_same_shape(kOp, "du_TD", t.du_TD, t.u_TD);
  dispatch(
      s, kOp, [&] { cpu::short_conv_backward(s, t, dw, w); },
      [&] { cuda::short_conv_backward(s, t, dw, w); },
      [&] { token_partials(s, (kShortConv + 2) * t.u_TD.cols()); });
}

void short_conv_decode(Stream& s, const ShortConvDecode& t, const ShortConvWeights& w) {
  constexpr std::string_view kOp = "short_conv_decode";
  check_short_conv(kOp, t.u_BD, t.gate_BD, t.positions_B, w);
  check_same_shape(kOp, "y_BD", t.y_BD, t.u_BD);
  check_matrix(kOp, "state_B2D", t.state_B2D, kF32, t.u_BD.rows(), 2 * t.u_BD.cols());
  dispatch(
      s, kOp, [&] { cpu::short_conv_decode(s, t, w); }, [&] { cuda::short_conv_decode(s, t, w); });
}

}  // namespace sbtrain::ops
