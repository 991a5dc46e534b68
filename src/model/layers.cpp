#include "model/layers.h"

#include <cmath>

#include "core/error.h"
#include "ops/gpt.h"
#include "ops/ops.h"

namespace sbtrain {
namespace {

constexpr const char* kGate = "mlp.gate_proj.weight";
constexpr const char* kUp = "mlp.up_proj.weight";
constexpr const char* kUpBias = "mlp.up_proj.bias";
constexpr const char* kDown = "mlp.down_proj.weight";
constexpr const char* kDownBias = "mlp.down_proj.bias";

// Widths that are no multiple of 8 run at a third of the speed; they are stored padded to 64.
int64_t fast_inner(int64_t inner) {
  return inner % 8 == 0 ? inner : (inner + 63) / 64 * 64;
}

}  // namespace

Buffer activation(Stream& s, std::string_view name, int64_t rows, int64_t cols) {
  return s.memory().allocate(MemoryClass::kActivations, name, s.memory().compute_dtype(),
                             {rows, cols});
}

Init into_residual(double init_std, int64_t layers) {
  return Init::normal(init_std / std::sqrt(2.0 * static_cast<double>(layers)));
}

Norm::Norm(const ModelConfig& config, std::string name)
    : centered_(config.norm == NormKind::kLayerNorm),
      eps_(static_cast<float>(config.norm_eps)),
      width_(config.width),
      weight_(name + ".weight"),
      bias_(name + ".bias") {}

void Norm::add_parameters(std::vector<TensorSpec>& specs) const {
  specs.push_back({.name = weight_, .shape = {width_}, .storage = {}, .init = Init::constant(1)});
  if (!centered_) return;
  specs.push_back({.name = bias_, .shape = {width_}, .storage = {}, .init = Init::constant(0)});
}

void Norm::forward(Stream& s, Tensor y_TD, Tensor x_TD, const Weights& w) const {
  if (centered_) {
    ops::layernorm(s, y_TD, x_TD, w.at(weight_), w.at(bias_), eps_);
  } else {
    ops::rmsnorm(s, y_TD, x_TD, w.at(weight_), eps_);
  }
}

void Norm::backward(Stream& s, Tensor dx_TD, const Weights& dw, Tensor dy_TD, Tensor x_TD,
                    const Weights& w) const {
  if (centered_) {
    ops::layernorm_backward(s, dx_TD, dw.at(weight_), dw.at(bias_), dy_TD, x_TD, w.at(weight_),
                            eps_, true);
  } else {
    ops::rmsnorm_backward(s, dx_TD, dw.at(weight_), dy_TD, x_TD, w.at(weight_), eps_);
  }
}

Mlp::Mlp(const ModelConfig& config)
    : kind_(config.mlp),
      layers_(config.layers),
      width_(config.width),
      inner_(fast_inner(config.inner)),
      logical_inner_(config.inner),
      residual_(static_cast<float>(config.residual_multiplier)),
      init_std_(static_cast<float>(config.init_std)) {
  if (kind_ != MlpKind::kSwiGlu && residual_ != 1.0f) {
    fail(ExitCode::kConfig, "model.residual_multiplier: only blocks with SwiGLU take it, not {}",
         name_of(config.mlp));
  }
}

void Mlp::add_parameters(std::vector<TensorSpec>& specs) const {
  if (kind_ == MlpKind::kNone) return;
  const int64_t d = width_;
  const int64_t f = logical_inner_;
  const Init matrix = Init::normal(init_std_);
  if (kind_ == MlpKind::kSwiGlu) {
    specs.push_back(
        {.name = kGate, .shape = {f, d}, .storage = {inner_, d}, .init = matrix, .decay = true});
  }
  specs.push_back({.name = kUp,
                   .shape = {f, d},
                   .storage = {inner_, d},
                   .init = matrix,
                   .decay = true,
                   .fused = kind_ == MlpKind::kSwiGlu});
  if (kind_ == MlpKind::kGelu) {
    specs.push_back(
        {.name = kUpBias, .shape = {f}, .storage = {inner_}, .init = Init::constant(0)});
  }
  specs.push_back({.name = kDown,
                   .shape = {d, f},
                   .storage = {d, inner_},
                   .init = into_residual(init_std_, layers_),
                   .decay = true});
  if (kind_ == MlpKind::kGelu) {
    specs.push_back({.name = kDownBias, .shape = {d}, .storage = {}, .init = Init::constant(0)});
  }
}

void Mlp::activate(Stream& s, const Weights& w, const MlpSaved& saved) const {
  if (kind_ == MlpKind::kSwiGlu) {
    ops::swiglu(s, saved.inner_TF, saved.outer_TN);
  } else {
    ops::bias_gelu(s, saved.inner_TF, saved.outer_TN, w.at(kUpBias));
  }
}

void Mlp::forward(Stream& s, Tensor y_TD, Tensor x_TD, Tensor h_TD, const Weights& w,
                  MlpSaved& saved) const {
  if (kind_ == MlpKind::kNone) {
    if (!y_TD.defined()) return;
    ops::copy(s, y_TD, h_TD);
    ops::add(s, y_TD, x_TD);
    return;
  }
  const bool gated = kind_ == MlpKind::kSwiGlu;
  saved.outer_TN = activation(s, gated ? "gate_up" : "up", x_TD.rows(), outer());
  saved.inner_TF = activation(s, "inner", x_TD.rows(), inner_);
  ops::linear(s, saved.outer_TN, x_TD, gated ? w.fused(kGate, 2) : w.at(kUp));
  activate(s, w, saved);
  if (!y_TD.defined()) return;
  ops::linear(s, y_TD, saved.inner_TF, w.at(kDown), {.alpha = residual_, .residual = h_TD});
  if (!gated) ops::add_bias(s, y_TD, w.at(kDownBias));
}

void Mlp::recompute(Stream& s, const Weights& w, MlpSaved& saved) const {
  if (kind_ == MlpKind::kNone) return;
  saved.inner_TF = activation(s, "inner", saved.outer_TN.tensor().rows(), inner_);
  activate(s, w, saved);
}

void Mlp::backward(Stream& s, Tensor dx_TD, const Weights& dw, Tensor dy_TD, Tensor x_TD,
                   const Weights& w, const MlpSaved& saved) const {
  if (kind_ == MlpKind::kNone) {
    ops::copy(s, dx_TD, dy_TD);
    return;
  }
  const bool gated = kind_ == MlpKind::kSwiGlu;
  const int64_t T = dy_TD.rows();
  Buffer dinner_TF = activation(s, "dinner", T, inner_);
  Buffer douter_TN = activation(s, gated ? "dgate_up" : "dup", T, outer());
  ops::linear_backward_weight(s, dw.at(kDown), dy_TD, saved.inner_TF, residual_);
  ops::linear_backward_input(s, dinner_TF, dy_TD, w.at(kDown), residual_);
  if (gated) {
    ops::swiglu_backward(s, douter_TN, dinner_TF, saved.outer_TN);
  } else {
    ops::bias_backward(s, dw.at(kDownBias), dy_TD);
    ops::bias_gelu_backward(s, douter_TN, dinner_TF, saved.outer_TN, w.at(kUpBias));
    ops::bias_backward(s, dw.at(kUpBias), douter_TN);
  }
  ops::linear_backward_weight(s, gated ? dw.fused(kGate, 2) : dw.at(kUp), douter_TN, x_TD);
  ops::linear_backward_input(s, dx_TD, douter_TN, gated ? w.fused(kGate, 2) : w.at(kUp));
}

}  // namespace sbtrain
