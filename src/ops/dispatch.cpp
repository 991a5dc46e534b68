// Every op but attention: checks its tensors, then runs on the stream's backend.
#include "ops/check.h"
#include "ops/cpu/cpu.h"
#include "ops/cuda/cuda.h"
#include "ops/ops.h"
#include "ops/scratch.h"

namespace sbtrain::ops {
namespace {

constexpr DType kF32 = DType::kF32;
constexpr DType kI32 = DType::kI32;
constexpr DType kF64 = DType::kF64;

}  // namespace

// ---- Memory -------------------------------------------------------------------------------

void fill(Stream& s, Tensor x, float value) {
  dispatch(
      s, "fill", [&] { cpu::fill(s, x, value); }, [&] { cuda::fill(s, x, value); });
}

void copy(Stream& s, Tensor y, Tensor x) {
  check_matrix("copy", "x", x, x.dtype, y.rows(), y.cols());
  dispatch(
      s, "copy", [&] { cpu::copy(s, y, x); }, [&] { cuda::copy(s, y, x); });
}

void add(Stream& s, Tensor y, Tensor x) {
  check_matrix("add", "y", y, kF32, y.rows(), y.cols());
  check_same_shape("add", "x", x, y);
  dispatch(
      s, "add", [&] { cpu::add(s, y, x); }, [&] { cuda::add(s, y, x); });
}

void copy_from_host(Stream& s, Tensor y, const void* host) {
  check_flat("copy_from_host", "y", y, y.dtype, y.numel());
  dispatch(
      s, "copy_from_host", [&] { cpu::copy_from_host(s, y, host); },
      [&] { cuda::copy_from_host(s, y, host); });
}

void copy_to_host(Stream& s, void* host, Tensor x) {
  check_flat("copy_to_host", "x", x, x.dtype, x.numel());
  dispatch(
      s, "copy_to_host", [&] { cpu::copy_to_host(s, host, x); },
      [&] { cuda::copy_to_host(s, host, x); });
}

void synchronize(Stream& s) {
  dispatch(
      s, "synchronize", [&] { cpu::synchronize(s); }, [&] { cuda::synchronize(s); });
}

void begin_tuning(Stream& s, const std::string& known) {
  s.set_tuning(true);
  if constexpr (kHasCuda) {
    if (s.backend() == Backend::kCuda) cuda::add_choices(s, known);
  }
}

std::string end_tuning(Stream& s) {
  s.set_tuning(false);
  if constexpr (kHasCuda) {
    if (s.backend() == Backend::kCuda) return cuda::keep_choices(s);
  }
  return {};
}

// ---- Embedding ------------------------------------------------------------------------------

void embedding(Stream& s, Tensor y_TD, Tensor tokens_T, Tensor w_VD, float scale) {
  check_matrix("embedding", "y_TD", y_TD, kF32, y_TD.rows(), w_VD.cols());
  check_flat("embedding", "tokens_T", tokens_T, kI32, y_TD.rows());
  check_matrix("embedding", "w_VD", w_VD, kF32, w_VD.rows(), y_TD.cols());
  dispatch(
      s, "embedding", [&] { cpu::embedding(s, y_TD, tokens_T, w_VD, scale); },
      [&] { cuda::embedding(s, y_TD, tokens_T, w_VD, scale); });
}

void embedding_backward(Stream& s, Tensor dw_VD, Tensor dy_TD, Tensor tokens_T, float scale) {
  check_matrix("embedding_backward", "dy_TD", dy_TD, kF32, dy_TD.rows(), dw_VD.cols());
  check_flat("embedding_backward", "tokens_T", tokens_T, kI32, dy_TD.rows());
  check_matrix("embedding_backward", "dw_VD", dw_VD, kF32, dw_VD.rows(), dy_TD.cols());
  dispatch(
      s, "embedding_backward", [&] { cpu::embedding_backward(s, dw_VD, dy_TD, tokens_T, scale); },
      [&] { cuda::embedding_backward(s, dw_VD, dy_TD, tokens_T, scale); },
      [&] { embedding_scratch(s, dy_TD.rows(), dy_TD.cols()); });
}

// ---- Normalisation ----------------------------------------------------------------------------

void rmsnorm(Stream& s, Tensor y_TD, Tensor x_TD, Tensor w_D, float eps) {
  check_matrix("rmsnorm", "x_TD", x_TD, kF32, x_TD.rows(), x_TD.cols());
  check_same_shape("rmsnorm", "y_TD", y_TD, x_TD);
  check_flat("rmsnorm", "w_D", w_D, kF32, x_TD.cols());
  dispatch(
      s, "rmsnorm", [&] { cpu::rmsnorm(s, y_TD, x_TD, w_D, eps); },
      [&] { cuda::rmsnorm(s, y_TD, x_TD, w_D, eps); });
}

void rmsnorm_backward(Stream& s, Tensor dx_TD, Tensor dw_D, Tensor dy_TD, Tensor x_TD, Tensor w_D,
                      float eps) {
  constexpr std::string_view kOp = "rmsnorm_backward";
  check_matrix(kOp, "x_TD", x_TD, kF32, x_TD.rows(), x_TD.cols());
  check_same_shape(kOp, "dx_TD", dx_TD, x_TD);
  check_same_shape(kOp, "dy_TD", dy_TD, x_TD);
  check_flat(kOp, "w_D", w_D, kF32, x_TD.cols());
  check_flat(kOp, "dw_D", dw_D, kF32, x_TD.cols());
  dispatch(
      s, kOp, [&] { cpu::rmsnorm_backward(s, dx_TD, dw_D, dy_TD, x_TD, w_D, eps); },
      [&] { cuda::rmsnorm_backward(s, dx_TD, dw_D, dy_TD, x_TD, w_D, eps); },
      [&] { token_partials(s, x_TD.cols()); });
}

void head_norm(Stream& s, Tensor y_THd, Tensor x_THd, Tensor w_Hd, Tensor b_Hd, int heads,
               float eps) {
  constexpr std::string_view kOp = "head_norm";
  check_matrix(kOp, "x_THd", x_THd, kF32, x_THd.rows(), x_THd.cols());
  check_same_shape(kOp, "y_THd", y_THd, x_THd);
  check_flat(kOp, "w_Hd", w_Hd, kF32, x_THd.cols());
  check_flat(kOp, "b_Hd", b_Hd, kF32, x_THd.cols());
  require(heads > 0 && x_THd.cols() % heads == 0, "{}: {} heads do not divide {}", kOp, heads,
          x_THd.describe());
  dispatch(
      s, kOp, [&] { cpu::head_norm(s, y_THd, x_THd, w_Hd, b_Hd, heads, eps); },
      [&] { cuda::head_norm(s, y_THd, x_THd, w_Hd, b_Hd, heads, eps); });
}

void head_norm_backward(Stream& s, Tensor dx_THd, Tensor dw_Hd, Tensor db_Hd, Tensor dy_THd,
                        Tensor x_THd, Tensor w_Hd, int heads, float eps) {
  constexpr std::string_view kOp = "head_norm_backward";
  check_matrix(kOp, "x_THd", x_THd, kF32, x_THd.rows(), x_THd.cols());
  check_same_shape(kOp, "dx_THd", dx_THd, x_THd);
  check_same_shape(kOp, "dy_THd", dy_THd, x_THd);
  check_flat(kOp, "w_Hd", w_Hd, kF32, x_THd.cols());
  check_flat(kOp, "dw_Hd", dw_Hd, kF32, x_THd.cols());
  check_flat(kOp, "db_Hd", db_Hd, kF32, x_THd.cols());
  require(heads > 0 && x_THd.cols() % heads == 0, "{}: {} heads do not divide {}", kOp, heads,
          x_THd.describe());
  dispatch(
      s, kOp,
      [&] { cpu::head_norm_backward(s, dx_THd, dw_Hd, db_Hd, dy_THd, x_THd, w_Hd, heads, eps); },
      [&] { cuda::head_norm_backward(s, dx_THd, dw_Hd, db_Hd, dy_THd, x_THd, w_Hd, heads, eps); },
      [&] { token_partials(s, 2 * x_THd.cols()); });
}

// ---- Linear -------------------------------------------------------------------------------------

void linear(Stream& s, Tensor y_TN, Tensor x_TK, Tensor w_NK, const LinearOptions& options) {
  check_matrix("linear", "y_TN", y_TN, kF32, x_TK.rows(), w_NK.rows());
  check_matrix("linear", "x_TK", x_TK, kF32, y_TN.rows(), w_NK.cols());
  check_matrix("linear", "w_NK", w_NK, kF32, y_TN.cols(), x_TK.cols());
  if (options.residual.defined()) check_same_shape("linear", "residual", options.residual, y_TN);
  dispatch(
      s, "linear", [&] { cpu::linear(s, y_TN, x_TK, w_NK, options); },
      [&] { cuda::linear(s, y_TN, x_TK, w_NK, options); }, [&] { linear_workspace(s); });
}

void linear_backward_input(Stream& s, Tensor dx_TK, Tensor dy_TN, Tensor w_NK, float alpha,
                           bool accumulate) {
  constexpr std::string_view kOp = "linear_backward_input";
  check_matrix(kOp, "dx_TK", dx_TK, kF32, dy_TN.rows(), w_NK.cols());
  check_matrix(kOp, "dy_TN", dy_TN, kF32, dx_TK.rows(), w_NK.rows());
  check_matrix(kOp, "w_NK", w_NK, kF32, dy_TN.cols(), dx_TK.cols());
  dispatch(
      s, kOp, [&] { cpu::linear_backward_input(s, dx_TK, dy_TN, w_NK, alpha, accumulate); },
      [&] { cuda::linear_backward_input(s, dx_TK, dy_TN, w_NK, alpha, accumulate); },
      [&] { linear_workspace(s); });
}

void linear_backward_weight(Stream& s, Tensor dw_NK, Tensor dy_TN, Tensor x_TK, float alpha) {
  constexpr std::string_view kOp = "linear_backward_weight";
  check_matrix(kOp, "dw_NK", dw_NK, kF32, dy_TN.cols(), x_TK.cols());
  check_matrix(kOp, "dy_TN", dy_TN, kF32, x_TK.rows(), dw_NK.rows());
  check_matrix(kOp, "x_TK", x_TK, kF32, dy_TN.rows(), dw_NK.cols());
  dispatch(
      s, kOp, [&] { cpu::linear_backward_weight(s, dw_NK, dy_TN, x_TK, alpha); },
      [&] { cuda::linear_backward_weight(s, dw_NK, dy_TN, x_TK, alpha); },
      [&] { linear_workspace(s); });
}

void bias_backward(Stream& s, Tensor db_N, Tensor dy_TN) {
  check_matrix("bias_backward", "dy_TN", dy_TN, kF32, dy_TN.rows(), dy_TN.cols());
  check_flat("bias_backward", "db_N", db_N, kF32, dy_TN.cols());
  dispatch(
      s, "bias_backward", [&] { cpu::bias_backward(s, db_N, dy_TN); },
      [&] { cuda::bias_backward(s, db_N, dy_TN); }, [&] { token_partials(s, dy_TN.cols()); });
}

// ---- Activations ------------------------------------------------------------------------------

void swiglu(Stream& s, Tensor y_TF, Tensor gate_up_T2F) {
  check_matrix("swiglu", "y_TF", y_TF, kF32, y_TF.rows(), y_TF.cols());
  check_matrix("swiglu", "gate_up_T2F", gate_up_T2F, kF32, y_TF.rows(), 2 * y_TF.cols());
  dispatch(
      s, "swiglu", [&] { cpu::swiglu(s, y_TF, gate_up_T2F); },
      [&] { cuda::swiglu(s, y_TF, gate_up_T2F); });
}

void swiglu_backward(Stream& s, Tensor dgate_up_T2F, Tensor dy_TF, Tensor gate_up_T2F) {
  constexpr std::string_view kOp = "swiglu_backward";
  check_matrix(kOp, "dy_TF", dy_TF, kF32, dy_TF.rows(), dy_TF.cols());
  check_matrix(kOp, "gate_up_T2F", gate_up_T2F, kF32, dy_TF.rows(), 2 * dy_TF.cols());
  check_same_shape(kOp, "dgate_up_T2F", dgate_up_T2F, gate_up_T2F);
  dispatch(
      s, kOp, [&] { cpu::swiglu_backward(s, dgate_up_T2F, dy_TF, gate_up_T2F); },
      [&] { cuda::swiglu_backward(s, dgate_up_T2F, dy_TF, gate_up_T2F); });
}

void bias_sigmoid(Stream& s, Tensor y_TH, Tensor x_TH, Tensor b_H) {
  check_matrix("bias_sigmoid", "x_TH", x_TH, kF32, x_TH.rows(), x_TH.cols());
  check_same_shape("bias_sigmoid", "y_TH", y_TH, x_TH);
  check_flat("bias_sigmoid", "b_H", b_H, kF32, x_TH.cols());
  dispatch(
      s, "bias_sigmoid", [&] { cpu::bias_sigmoid(s, y_TH, x_TH, b_H); },
      [&] { cuda::bias_sigmoid(s, y_TH, x_TH, b_H); });
}

void sigmoid_backward(Stream& s, Tensor dx_TH, Tensor dy_TH, Tensor y_TH) {
  check_matrix("sigmoid_backward", "y_TH", y_TH, kF32, y_TH.rows(), y_TH.cols());
  check_same_shape("sigmoid_backward", "dx_TH", dx_TH, y_TH);
  check_same_shape("sigmoid_backward", "dy_TH", dy_TH, y_TH);
  dispatch(
      s, "sigmoid_backward", [&] { cpu::sigmoid_backward(s, dx_TH, dy_TH, y_TH); },
      [&] { cuda::sigmoid_backward(s, dx_TH, dy_TH, y_TH); });
}

// ---- Positions ----------------------------------------------------------------------------------

void rope(Stream& s, Tensor x_THd, Tensor positions_T, const RopeParams& params) {
  check_matrix("rope", "x_THd", x_THd, kF32, x_THd.rows(), x_THd.cols());
  check_flat("rope", "positions_T", positions_T, kI32, x_THd.rows());
  require(params.heads > 0 && x_THd.cols() % (2 * params.heads) == 0,
          "rope: {} heads of an even dimension do not divide {}", params.heads, x_THd.describe());
  dispatch(
      s, "rope", [&] { cpu::rope(s, x_THd, positions_T, params); },
      [&] { cuda::rope(s, x_THd, positions_T, params); });
}

// ---- Loss ---------------------------------------------------------------------------------------

void linear_cross_entropy(Stream& s, const CrossEntropy& t) {
  constexpr std::string_view kOp = "linear_cross_entropy";
  const int64_t tokens = t.x_TD.rows();
  const int64_t vocab = t.w_VD.rows();
  check_matrix(kOp, "x_TD", t.x_TD, kF32, tokens, t.w_VD.cols());
  check_matrix(kOp, "w_VD", t.w_VD, kF32, vocab, t.x_TD.cols());
  check_flat(kOp, "loss_T", t.loss_T, kF32, tokens);
  if (t.hits_T.defined()) check_flat(kOp, "hits_T", t.hits_T, kF32, tokens);
  check_flat(kOp, "targets_T", t.targets_T, kI32, tokens);
  require(t.dx_TD.defined() == t.dw_VD.defined(), "{}: dx_TD and dw_VD come together", kOp);
  if (t.dx_TD.defined()) {
    check_same_shape(kOp, "dx_TD", t.dx_TD, t.x_TD);
    check_same_shape(kOp, "dw_VD", t.dw_VD, t.w_VD);
  }
  dispatch(
      s, kOp, [&] { cpu::linear_cross_entropy(s, t); }, [&] { cuda::linear_cross_entropy(s, t); },
      [&] {
        const LogitsChunk chunk = logits_chunk(s, tokens, vocab, t.dx_TD.defined());
        linear_workspace(s);
      });
}

// ---- Optimizer ------------------------------------------------------------------------------

void add_sum(Stream& s, Tensor y_1, Tensor x) {
  check_flat("add_sum", "y_1", y_1, kF64, 1);
  check_matrix("add_sum", "x", x, kF32, x.rows(), x.cols());
  dispatch(
      s, "add_sum", [&] { cpu::add_sum(s, y_1, x); }, [&] { cuda::add_sum(s, y_1, x); },
      [&] { reduction_partials(s); });
}

void add_squared_norm(Stream& s, Tensor y_1, Tensor x) {
  check_flat("add_squared_norm", "y_1", y_1, kF64, 1);
  check_matrix("add_squared_norm", "x", x, kF32, x.rows(), x.cols());
  dispatch(
      s, "add_squared_norm", [&] { cpu::add_squared_norm(s, y_1, x); },
      [&] { cuda::add_squared_norm(s, y_1, x); }, [&] { reduction_partials(s); });
}

double sum(Stream& s, Tensor x) {
  const Buffer y_1 = s.scratch("sum", DType::kF64, {1});
  fill(s, y_1, 0);
  add_sum(s, y_1, x);
  double value = 0;
  copy_to_host(s, &value, y_1);
  return value;
}

void finish_step(Stream& s, Tensor stats, double clip, double beta1, double beta2) {
  check_flat("finish_step", "stats", stats, kF64, kStepStats);
  dispatch(
      s, "finish_step", [&] { cpu::finish_step(s, stats, clip, beta1, beta2); },
      [&] { cuda::finish_step(s, stats, clip, beta1, beta2); });
}

void adamw(Stream& s, const AdamW& t) {
  const int64_t n = t.w_N.numel();
  check_flat("adamw", "w_N", t.w_N, kF32, n);
  check_flat("adamw", "m_N", t.m_N, kF32, n);
  check_flat("adamw", "v_N", t.v_N, kF32, n);
  check_flat("adamw", "grad_N", t.grad_N, kF32, n);
  if (t.compute_N.defined()) check_flat("adamw", "compute_N", t.compute_N, kF32, n);
  check_flat("adamw", "stats", t.stats, kF64, kStepStats);
  int64_t end = 0;
  for (const DecayRange& range : t.decays) {
    require(range.begin >= end && range.end >= range.begin && range.end <= n,
            "adamw: decay range [{}, {}) of {} elements", range.begin, range.end, n);
    end = range.end;
  }
  dispatch(
      s, "adamw", [&] { cpu::adamw(s, t); }, [&] { cuda::adamw(s, t); });
}

}  // namespace sbtrain::ops
