// Muon: momentum, its orthogonalisation, and the step (optim/muon.cpp has the sources).
#pragma once

#include <algorithm>

#include "core/error.h"
#include "kernels/muon.h"
#include "ops/optimizer.h"
#include "ops/scratch.h"

namespace sbtrain::ops {

// On N elements, unless kApply is 0:
//   g = kGradScale * grad;  m = momentum * m + g;  y = g + momentum * m with nesterov, else m
// Where kApply is 0, m keeps its bits and y is 0.
struct MuonMomentum {
  static constexpr std::string_view kName = "muon_momentum";
  Tensor y_N{};        // in the compute type; undefined: only m is wanted
  Tensor m_N, grad_N;  // f32
  Tensor stats;        // f64 [kStepStats]
  float momentum;
  bool nesterov;
  void check() const {
    const Check c(kName);
    c.flat("m_N", m_N, grad_N.numel(), DType::kF32);
    c.flat("grad_N", grad_N, grad_N.numel(), DType::kF32);
    c.flat("stats", stats, kStepStats, DType::kF64);
    if (y_N.defined()) c.flat("y_N", y_N, grad_N.numel());
  }
  kernels::MuonMomentum kernel() const {
    return {stats, momentum, nesterov, m_N, grad_N, y_N, grad_N.numel()};
  }
};

// y = x / (margin * the Frobenius norm of x), in the compute type; 0 if x is 0.
struct Normalize {
  static constexpr std::string_view kName = "normalize";
  Tensor y_N, x_N;
  float margin;
  void check() const {
    Check(kName).flat("x_N", x_N, x_N.numel());
    Check(kName).flat("y_N", y_N, x_N.numel(), x_N.dtype);
  }
  Buffer scratch(const Stream& s) const { return reduction_partials(s); }
  kernels::Normalize kernel() const { return {y_N, x_N, x_N.numel(), margin}; }
};

// Replaces x, of singular values s and the singular vectors U and V, by about U V^T: the
// polynomials of Polar Express (arXiv 2505.16932, five steps for values above 1e-3 of the largest,
// and a margin of 2% for rounding) bring every s that is not tiny near 1. With X = x / (1.02 |x|)
// and A = X X^T, or X^T X where that is smaller, each step is
//   X = a X + (b A + c A A) X     with its own a, b and c.
// Products are of the compute type, with sums in f32.
struct Orthogonalize {
  static constexpr std::string_view kName = "orthogonalize";
  static constexpr int kSteps = 5;
  static constexpr float kCoefficients[kSteps][3] = {
      {8.156554524902461f, -22.48329292557795f, 15.878769915207462f},
      {4.042929935166739f, -2.808917465908714f, 0.5000178451051316f},
      {3.8916678022926607f, -2.772484153217685f, 0.5060648178503393f},
      {3.285753657755655f, -2.3681294933425376f, 0.46449024233003106f},
      {2.3465413258596377f, -1.7097828382687081f, 0.42323551169305323f}};
  static constexpr float kMargin = 1.02f;
  struct Scratch {
    Buffer x_NK, a, b;  // another X, A and b A + c A A
    Buffer partials, workspace;
  };
  Tensor x_NK;
  // Multiplications and additions for a matrix of these sizes, times two.
  static double flops(int64_t rows, int64_t cols) {
    const auto most = static_cast<double>(std::max(rows, cols));
    const auto least = static_cast<double>(std::min(rows, cols));
    return kSteps * 2 * least * least * (2 * most + least);
  }
  void check() const {
    Check(kName).matrix("x_NK", x_NK);
    require(x_NK.contiguous(), "{}: {} has gaps between its rows", kName, x_NK.describe());
  }
  Scratch scratch(const Stream& s) const {
    const int64_t least = std::min(x_NK.rows(), x_NK.cols());
    return {s.scratch("matrix", x_NK.dtype, {x_NK.rows(), x_NK.cols()}),
            s.scratch("gram", x_NK.dtype, {least, least}),
            s.scratch("polynomial", x_NK.dtype, {least, least}), reduction_partials(s),
            linear_workspace(s)};
  }
};

// w = w - lr * (scale * y + decay * w) on N elements, unless kApply is 0.
struct MuonUpdate {
  static constexpr std::string_view kName = "muon_update";
  Tensor w_N;          // f32
  Tensor y_N;          // in the compute type
  Tensor compute_N{};  // optional, the new weights in the compute type
  Tensor stats;        // f64 [kStepStats]
  float lr, scale, decay;
  void check() const {
    const Check c(kName);
    c.flat("w_N", w_N, w_N.numel(), DType::kF32);
    c.flat("y_N", y_N, w_N.numel());
    if (compute_N.defined()) c.flat("compute_N", compute_N, w_N.numel());
    c.flat("stats", stats, kStepStats, DType::kF64);
  }
  kernels::MuonUpdate kernel() const {
    return {stats, lr, scale, decay, w_N, y_N, compute_N, w_N.numel()};
  }
};

namespace cpu {
void run(Cpu, Stream& s, const MuonMomentum& op);
void run(Cpu, Stream& s, const Normalize& op, const Buffer& scratch);
void run(Cpu, Stream& s, const Orthogonalize& op, const Orthogonalize::Scratch& scratch);
void run(Cpu, Stream& s, const MuonUpdate& op);
}  // namespace cpu
namespace cuda {
void run(Cuda, Stream& s, const Orthogonalize& op, const Orthogonalize::Scratch& scratch);
}  // namespace cuda

}  // namespace sbtrain::ops
