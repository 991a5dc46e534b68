// RMSNorm, LayerNorm and the norm of heads, forward and backward. Statistics are recomputed from x.
#pragma once

#include "kernels/norm.h"
#include "ops/limits.h"
#include "ops/scratch.h"

namespace sbtrain::ops {

// y = x / sqrt(mean(x^2) + eps) * w over each row (RMSNorm, arXiv 1910.07467).
struct RmsNorm {
  static constexpr std::string_view kName = "rmsnorm";
  Tensor y_TD;
  Tensor x_TD, w_D;
  float eps;
  Tensor amax_1{};  // optional, = the largest |y| (ops::Amax)
  void check() const {
    const Check c(kName);
    c.matrix("x_TD", x_TD);
    c.same("y_TD", y_TD, x_TD);
    c.flat("w_D", w_D, x_TD.cols(), x_TD.dtype);
    if (amax_1.defined()) c.flat("amax_1", amax_1, 1, DType::kF32);
  }
  void check_limits(const Target&) const { check_norm_width(kName, x_TD.cols()); }
  kernels::RmsNorm kernel() const {
    return {y_TD, x_TD, w_D, x_TD.rows(), x_TD.cols(), eps, amax_1};
  }
};

// dx += gradient; dw += gradient, or = without accumulate_dw.
struct RmsNormBackward {
  static constexpr std::string_view kName = "rmsnorm_backward";
  Tensor dx_TD, dw_D;
  Tensor dy_TD, x_TD, w_D;
  float eps;
  bool accumulate_dw = true;
  Tensor amax_1{};  // optional, = the largest |dx|
  void check() const {
    const Check c(kName);
    c.matrix("x_TD", x_TD);
    c.same("dx_TD", dx_TD, x_TD);
    c.same("dy_TD", dy_TD, x_TD);
    c.flat("w_D", w_D, x_TD.cols(), x_TD.dtype);
    c.flat("dw_D", dw_D, x_TD.cols(), DType::kF32);
    if (amax_1.defined()) c.flat("amax_1", amax_1, 1, DType::kF32);
  }
  void check_limits(const Target&) const { check_norm_width(kName, x_TD.cols()); }
  Buffer scratch(const Stream& s) const { return token_partials(s, x_TD.cols()); }
  kernels::RmsNormBackward kernel() const {
    return {dx_TD, dw_D, dy_TD, x_TD, w_D, x_TD.rows(), x_TD.cols(), eps, accumulate_dw, amax_1};
  }
};

// y = (x - mean) / sqrt(var + eps) * w + b over each row (arXiv 1607.06450).
struct LayerNorm {
  static constexpr std::string_view kName = "layernorm";
  Tensor y_TD;
  Tensor x_TD, w_D, b_D;
  float eps;
  void check() const {
    const Check c(kName);
    c.matrix("x_TD", x_TD);
    c.same("y_TD", y_TD, x_TD);
    c.flat("w_D", w_D, x_TD.cols(), x_TD.dtype);
    c.flat("b_D", b_D, x_TD.cols(), x_TD.dtype);
  }
  void check_limits(const Target&) const { check_norm_width(kName, x_TD.cols()); }
  kernels::LayerNorm kernel() const {
    return {y_TD, x_TD, w_D, b_D, x_TD.rows(), x_TD.cols(), eps};
  }
};

// dx = gradient, or += with accumulate; dw, db += gradient. dx may be dy.
struct LayerNormBackward {
  static constexpr std::string_view kName = "layernorm_backward";
  Tensor dx_TD, dw_D, db_D;
  Tensor dy_TD, x_TD, w_D;
  float eps;
  bool accumulate;
  void check() const {
    const Check c(kName);
    c.matrix("x_TD", x_TD);
    c.same("dx_TD", dx_TD, x_TD);
    c.same("dy_TD", dy_TD, x_TD);
    c.flat("w_D", w_D, x_TD.cols(), x_TD.dtype);
    c.flat("dw_D", dw_D, x_TD.cols(), DType::kF32);
    c.flat("db_D", db_D, x_TD.cols(), DType::kF32);
  }
  void check_limits(const Target&) const { check_norm_width(kName, x_TD.cols()); }
  Buffer scratch(const Stream& s) const { return token_partials(s, 2 * x_TD.cols()); }
  kernels::LayerNormBackward kernel() const {
    return {dx_TD, dw_D, db_D, dy_TD, x_TD, w_D, x_TD.rows(), x_TD.cols(), eps, accumulate};
  }
};

// Normalises each head of each token over its d channels: y = (x - mean) / sqrt(var + eps) * w + b,
// with one w and b per head and channel (head norm, arXiv 2410.17980). x and y are [T, H*d].
struct HeadNorm {
  static constexpr std::string_view kName = "head_norm";
  Tensor y_THd;
  Tensor x_THd, w_Hd, b_Hd;
  int heads;
  float eps;
  void check() const {
    const Check c(kName);
    c.heads("x_THd", x_THd, x_THd.rows(), heads);
    c.same("y_THd", y_THd, x_THd);
    c.flat("w_Hd", w_Hd, x_THd.cols(), x_THd.dtype);
    c.flat("b_Hd", b_Hd, x_THd.cols(), x_THd.dtype);
  }
  void check_limits(const Target&) const { check_norm_head_dim(kName, head_dim()); }
  int head_dim() const { return static_cast<int>(x_THd.cols() / heads); }
  kernels::HeadNorm kernel() const {
    return {y_THd, x_THd, w_Hd, b_Hd, x_THd.rows(), heads, head_dim(), eps};
  }
};

// dx = gradient; dw, db += gradient.
struct HeadNormBackward {
  static constexpr std::string_view kName = "head_norm_backward";
  Tensor dx_THd, dw_Hd, db_Hd;
  Tensor dy_THd, x_THd, w_Hd;
  int heads;
  float eps;
  void check() const {
    const Check c(kName);
    c.heads("x_THd", x_THd, x_THd.rows(), heads);
    c.same("dx_THd", dx_THd, x_THd);
    c.same("dy_THd", dy_THd, x_THd);
    c.flat("w_Hd", w_Hd, x_THd.cols(), x_THd.dtype);
    c.flat("dw_Hd", dw_Hd, x_THd.cols(), DType::kF32);
    c.flat("db_Hd", db_Hd, x_THd.cols(), DType::kF32);
  }
  void check_limits(const Target&) const { check_norm_head_dim(kName, head_dim()); }
  Buffer scratch(const Stream& s) const { return token_partials(s, 2 * x_THd.cols()); }
  int head_dim() const { return static_cast<int>(x_THd.cols() / heads); }
  kernels::HeadNormBackward kernel() const {
    return {dx_THd, dw_Hd, db_Hd, dy_THd, x_THd, w_Hd, x_THd.rows(), heads, head_dim(), eps};
  }
};

// The largest head of the two ops below: a row, where it is the only one.
inline void check_head_rmsnorm(std::string_view op, int heads, int64_t head_dim) {
  heads == 1 ? check_norm_width(op, head_dim) : check_norm_head_dim(op, head_dim);
}

// y = x / sqrt(mean(x^2) + eps) * w over the d channels of each head of each token, with one w for
// all heads: the norm of queries and keys (arXiv 2010.04245, with RMSNorm as in Qwen3). With one
// "head" it is that of a whole row (OLMo 2). x and y are [T, H*d]; rows may be strided.
struct HeadRmsNorm {
  static constexpr std::string_view kName = "head_rmsnorm";
  Tensor y_THd;
  Tensor x_THd, w_d;
  int heads;
  float eps;
  void check() const {
    const Check c(kName);
    const int64_t head_dim = c.heads("x_THd", x_THd, x_THd.rows(), heads);
    c.same("y_THd", y_THd, x_THd);
    c.flat("w_d", w_d, head_dim, x_THd.dtype);
  }
  void check_limits(const Target&) const { check_head_rmsnorm(kName, heads, head_dim()); }
  int head_dim() const { return static_cast<int>(x_THd.cols() / heads); }
  kernels::HeadRmsNorm kernel() const {
    return {y_THd, x_THd, w_d, x_THd.rows(), heads, head_dim(), eps};
  }
};

// dx = gradient; dw += gradient. dx may be dy.
struct HeadRmsNormBackward {
  static constexpr std::string_view kName = "head_rmsnorm_backward";
  Tensor dx_THd, dw_d;
  Tensor dy_THd, x_THd, w_d;
  int heads;
  float eps;
  void check() const {
    const Check c(kName);
    const int64_t head_dim = c.heads("x_THd", x_THd, x_THd.rows(), heads);
    c.same("dx_THd", dx_THd, x_THd);
    c.same("dy_THd", dy_THd, x_THd);
    c.flat("w_d", w_d, head_dim, x_THd.dtype);
    c.flat("dw_d", dw_d, head_dim, DType::kF32);
  }
  void check_limits(const Target&) const { check_head_rmsnorm(kName, heads, head_dim()); }
  Buffer scratch(const Stream& s) const { return token_partials(s, head_dim()); }
  int head_dim() const { return static_cast<int>(x_THd.cols() / heads); }
  kernels::HeadRmsNormBackward kernel() const {
    return {dx_THd, dw_d, dy_THd, x_THd, w_d, x_THd.rows(), heads, head_dim(), eps};
  }
};

namespace cpu {
void run(Cpu, Stream& s, const RmsNorm& op);
void run(Cpu, Stream& s, const RmsNormBackward& op, const Buffer& scratch);
void run(Cpu, Stream& s, const LayerNorm& op);
void run(Cpu, Stream& s, const LayerNormBackward& op, const Buffer& scratch);
void run(Cpu, Stream& s, const HeadNorm& op);
void run(Cpu, Stream& s, const HeadNormBackward& op, const Buffer& scratch);
void run(Cpu, Stream& s, const HeadRmsNorm& op);
void run(Cpu, Stream& s, const HeadRmsNormBackward& op, const Buffer& scratch);
}  // namespace cpu

}  // namespace sbtrain::ops
