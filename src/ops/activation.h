// Activations and their gradients.
#pragma once

#include "kernels/activation.h"
#include "ops/op.h"

namespace sbtrain::ops {

// y_TF = silu(gate) * up, gate = gate_up[:, :F], up = gate_up[:, F:]  (SwiGLU, arXiv 2002.05202).
struct Swiglu {
  static constexpr std::string_view kName = "swiglu";
  Tensor y_TF;
  Tensor gate_up_T2F;
  Tensor amax_1{};  // optional, = the largest |y| (ops::Amax)
  void check() const {
    const Check c(kName);
    c.matrix("y_TF", y_TF);
    c.matrix("gate_up_T2F", gate_up_T2F, y_TF.rows(), 2 * y_TF.cols(), y_TF.dtype);
    if (amax_1.defined()) c.flat("amax_1", amax_1, 1, DType::kF32);
  }
  kernels::Swiglu kernel() const { return {y_TF, gate_up_T2F, y_TF.rows(), y_TF.cols(), amax_1}; }
};

// dgate_up = gradient; dgate_up may be gate_up itself.
struct SwigluBackward {
  static constexpr std::string_view kName = "swiglu_backward";
  Tensor dgate_up_T2F;
  Tensor dy_TF, gate_up_T2F;
  Tensor amax_1{};  // optional, = the largest |dgate_up|
  void check() const {
    const Check c(kName);
    c.matrix("dy_TF", dy_TF);
    c.matrix("gate_up_T2F", gate_up_T2F, dy_TF.rows(), 2 * dy_TF.cols(), dy_TF.dtype);
    c.same("dgate_up_T2F", dgate_up_T2F, gate_up_T2F);
    if (amax_1.defined()) c.flat("amax_1", amax_1, 1, DType::kF32);
  }
  kernels::SwigluBackward kernel() const {
    return {dgate_up_T2F, dy_TF, gate_up_T2F, dy_TF.rows(), dy_TF.cols(), amax_1};
  }
};

// y = sigmoid(x + b_H) per column; x and y are [T, H], f32 on every backend: near 1, where most
// gates are, bf16 would be too coarse to represent 1 - y.
struct BiasSigmoid {
  static constexpr std::string_view kName = "bias_sigmoid";
  Tensor y_TH;
  Tensor x_TH, b_H;
  void check() const {
    const Check c(kName);
    c.matrix("x_TH", x_TH, x_TH.rows(), x_TH.cols(), DType::kF32);
    c.same("y_TH", y_TH, x_TH);
    c.flat("b_H", b_H, x_TH.cols());
  }
  kernels::BiasSigmoid kernel() const { return {y_TH, x_TH, b_H, x_TH.rows(), x_TH.cols()}; }
};

// dx_TH = dy * y * (1 - y), where y is f32 on every backend. dx may be dy.
struct SigmoidBackward {
  static constexpr std::string_view kName = "sigmoid_backward";
  Tensor dx_TH;
  Tensor dy_TH, y_TH;
  void check() const {
    const Check c(kName);
    c.matrix("y_TH", y_TH, y_TH.rows(), y_TH.cols(), DType::kF32);
    c.matrix("dy_TH", dy_TH, y_TH.rows(), y_TH.cols());
    c.same("dx_TH", dx_TH, dy_TH);
  }
  kernels::SigmoidBackward kernel() const { return {dx_TH, dy_TH, y_TH, y_TH.rows(), y_TH.cols()}; }
};

// y = gelu(x + b) per column, gelu(z) = z Phi(z) (arXiv 1606.08415): exact, or with tanh_form as
// GPT-2 has it, z (1 + tanh(sqrt(2/pi) (z + 0.044715 z^3))) / 2. y may be x.
struct BiasGelu {
  static constexpr std::string_view kName = "bias_gelu";
  Tensor y_TF;
  Tensor x_TF, b_F;
  bool tanh_form = false;
  void check() const {
    const Check c(kName);
    c.matrix("x_TF", x_TF);
    c.same("y_TF", y_TF, x_TF);
    c.flat("b_F", b_F, x_TF.cols(), x_TF.dtype);
  }
  kernels::BiasGelu kernel() const {
    return {y_TF, x_TF, b_F, x_TF.rows(), x_TF.cols(), tanh_form};
  }
};

// dx = dy gelu'(x + b); the gradient of b is the sum of its rows. dx may be dy or x.
struct BiasGeluBackward {
  static constexpr std::string_view kName = "bias_gelu_backward";
  Tensor dx_TF;
  Tensor dy_TF, x_TF, b_F;
  bool tanh_form = false;
  void check() const {
    const Check c(kName);
    c.matrix("x_TF", x_TF);
    c.same("dx_TF", dx_TF, x_TF);
    c.same("dy_TF", dy_TF, x_TF);
    c.flat("b_F", b_F, x_TF.cols(), x_TF.dtype);
  }
  kernels::BiasGeluBackward kernel() const {
    return {dx_TF, dy_TF, x_TF, b_F, x_TF.rows(), x_TF.cols(), tanh_form};
  }
};

namespace cpu {
void run(Cpu, Stream& s, const Swiglu& op);
void run(Cpu, Stream& s, const SwigluBackward& op);
void run(Cpu, Stream& s, const BiasSigmoid& op);
void run(Cpu, Stream& s, const SigmoidBackward& op);
void run(Cpu, Stream& s, const BiasGelu& op);
void run(Cpu, Stream& s, const BiasGeluBackward& op);
}  // namespace cpu

}  // namespace sbtrain::ops
