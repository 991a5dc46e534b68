// Matrix products, and the biases that go with them.
#pragma once

#include "kernels/activation.h"
#include "ops/scratch.h"

namespace sbtrain::ops {

// y_TN = alpha * x_TK w_NK^T (+ residual_TN). x and y may have strided rows. Up to 64 rows, on the
// CPU (cpu/blas.h) as on CUDA (kernels/skinny_gemm.h), the bits of a row do not depend on
// the others.
struct Linear {
  static constexpr std::string_view kName = "linear";
  Tensor y_TN;
  Tensor x_TK, w_NK;
  float alpha = 1.0f;
  Tensor residual{};  // same shape as y, may be y itself
  void check() const {
    const Check c(kName);
    c.matrix("y_TN", y_TN, x_TK.rows(), w_NK.rows());
    c.matrix("x_TK", x_TK, y_TN.rows(), w_NK.cols());
    c.matrix("w_NK", w_NK, y_TN.cols(), x_TK.cols(), x_TK.dtype);
    if (residual.defined()) c.same("residual", residual, y_TN);
  }
  Buffer scratch(const Stream& s) const { return linear_workspace(s); }
};

// y_BN = alpha * rmsnorm(x_BK) w_NK^T (+ residual_BN), or, with swiglu, where N counts the outputs
// and w has the 2N rows of gates and then values,
//   y_BN = swiglu(alpha * rmsnorm(x_BK) w^T)
// for the few rows of a decode step: on CUDA, up to 8 rows are one kernel, and up to 64 take one
// more for the norm (kernels/skinny_gemm.h). As there, the bits of a row do not depend on the
// others.
struct DecodeLinear {
  static constexpr std::string_view kName = "decode_linear";
  struct Scratch {
    Buffer normed_BK;
    Buffer gate_up_B2N, workspace;  // where it is made of several ops
  };
  Tensor y_BN;
  Tensor x_BK, w_NK;
  float alpha = 1.0f;
  Tensor residual{};  // same shape as y, may be y itself; not with swiglu
  Tensor norm_K{};    // the weights of the RMSNorm; undefined: x is multiplied as it is
  float norm_eps = 0.0f;
  bool swiglu = false;
  int64_t products() const { return (swiglu ? 2 : 1) * y_BN.cols(); }
  void check() const {
    const Check c(kName);
    c.matrix("y_BN", y_BN);
    c.matrix("x_BK", x_BK, y_BN.rows(), w_NK.cols());
    c.matrix("w_NK", w_NK, products(), x_BK.cols(), x_BK.dtype);
    if (residual.defined()) c.same("residual", residual, y_BN);
    if (norm_K.defined()) c.flat("norm_K", norm_K, x_BK.cols(), x_BK.dtype);
    if (residual.defined() && swiglu) {
      fail(ExitCode::kInternal, "{}: there is no residual with swiglu", kName);
    }
  }
  Scratch scratch(const Stream& s) const {
    const auto buffer = [&](std::string_view name, int64_t cols) {
      return s.scratch(name, s.memory().compute_dtype(), {y_BN.rows(), cols});
    };
    Scratch scratch;
    if (norm_K.defined()) scratch.normed_BK = buffer("normed", x_BK.cols());
    if (on_cuda(s) && y_BN.rows() <= kernels::kSkinnyRows) return scratch;
    scratch.workspace = linear_workspace(s);
    if (swiglu) scratch.gate_up_B2N = buffer("gate_up", products());
    return scratch;
  }
};

// The gradients of such a product, of which one may be left out:
//   dw_NK += alpha * dy_TN^T x_TK,  dx_TK = alpha * dy_TN w_NK,
// with dw = without accumulate_dw and dx += with accumulate_dx. They do not depend on each other:
// on CUDA, products that are too small to fill a GPU run at the same time while the stream is
// recorded (core/graph.h), with the bits of one after the other.
struct LinearBackward {
  static constexpr std::string_view kName = "linear_backward";
  struct Scratch {
    Buffer workspace;
    Buffer second;  // for products at the same time; none where that does not pay
  };
  Tensor dx_TK{}, dw_NK{};
  Tensor dy_TN;
  Tensor x_TK{};  // with dw_NK
  Tensor w_NK{};  // with dx_TK
  float alpha = 1.0f;
  bool accumulate_dx = false;
  bool accumulate_dw = true;
  // Whether there are two, which leave most multiprocessors idle.
  bool small() const {
    constexpr int64_t kSmall = int64_t{1} << 28;  // multiplications and additions
    return dx_TK.defined() && dw_NK.defined() && dy_TN.rows() * dy_TN.cols() * w_NK.cols() < kSmall;
  }
  void check() const {
    const Check c(kName);
    c.matrix("dy_TN", dy_TN);
    if (dx_TK.defined()) {
      c.matrix("w_NK", w_NK, dy_TN.cols(), w_NK.cols(), dy_TN.dtype);
      c.matrix("dx_TK", dx_TK, dy_TN.rows(), w_NK.cols());
    }
    if (dw_NK.defined()) {
      c.matrix("x_TK", x_TK, dy_TN.rows(), x_TK.cols(), dy_TN.dtype);
      c.matrix("dw_NK", dw_NK, dy_TN.cols(), x_TK.cols());
    }
  }
  Scratch scratch(const Stream& s) const {
    return {linear_workspace(s), small() ? linear_workspace(s) : Buffer()};
  }
};

// y_TN[t] += b_N.
struct AddBias {
  static constexpr std::string_view kName = "add_bias";
  Tensor y_TN;
  Tensor b_N;
  void check() const {
    Check(kName).matrix("y_TN", y_TN);
    Check(kName).flat("b_N", b_N, y_TN.cols(), y_TN.dtype);
  }
  kernels::AddBias kernel() const { return {y_TN, b_N, y_TN.rows(), y_TN.cols()}; }
};

// db_N += column sums of dy_TN.
struct BiasBackward {
  static constexpr std::string_view kName = "bias_backward";
  Tensor db_N;
  Tensor dy_TN;
  void check() const {
    Check(kName).matrix("dy_TN", dy_TN);
    Check(kName).flat("db_N", db_N, dy_TN.cols(), DType::kF32);
  }
  Buffer scratch(const Stream& s) const { return token_partials(s, dy_TN.cols()); }
  kernels::BiasBackward kernel() const { return {db_N, dy_TN, dy_TN.rows(), dy_TN.cols()}; }
};

namespace cpu {
void run(Cpu, Stream& s, const Linear& op, const Buffer& workspace);
void run(Cpu, Stream& s, const DecodeLinear& op, const DecodeLinear::Scratch& scratch);
void run(Cpu, Stream& s, const LinearBackward& op, const LinearBackward::Scratch& scratch);
void run(Cpu, Stream& s, const AddBias& op);
void run(Cpu, Stream& s, const BiasBackward& op, const Buffer& scratch);
}  // namespace cpu
namespace cuda {
void run(Cuda, Stream& s, const Linear& op, const Buffer& workspace);
void run(Cuda, Stream& s, const DecodeLinear& op, const DecodeLinear::Scratch& scratch);
void run(Cuda, Stream& s, const LinearBackward& op, const LinearBackward::Scratch& scratch);
}  // namespace cuda

}  // namespace sbtrain::ops
