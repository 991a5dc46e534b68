#include "layers/mlp.h"

#include <utility>

#include "core/error.h"
#include "layers/activations.h"
#include "ops/activation.h"
#include "ops/memory.h"

namespace sbtrain {
namespace {

constexpr const char* kGate = "mlp.gate_proj.weight";
constexpr const char* kUp = "mlp.up_proj.weight";
constexpr const char* kUpBias = "mlp.up_proj.bias";
constexpr const char* kDown = "mlp.down_proj.weight";
constexpr const char* kDownBias = "mlp.down_proj.bias";

// Products with a width that is not a multiple of 8 run at a third of the speed, so such widths are
// stored padded to a multiple of 64.
int64_t fast_inner(int64_t inner) {
  return inner % 8 == 0 ? inner : (inner + 63) / 64 * 64;
}

Buffer amax(Stream& s, const char* name) {
  return s.allocate(MemoryClass::kActivations, name, DType::kF32, {1});
}

}  // namespace

Mlp::Mlp(const MlpSpec& spec)
    : kind_(spec.kind),
      inner_(fast_inner(spec.inner)),
      outer_(outer_spec(spec)),
      down_(down_spec(spec)) {
  if (!gated() && spec.residual_multiplier != 1.0f) {
    fail(ExitCode::kConfig, "model.residual_multiplier: only blocks with SwiGLU take it, not {}",
         name_of(spec.kind));
  }
}

LinearSpec Mlp::outer_spec(const MlpSpec& spec) const {
  const LinearSpec::Part gate{.weight = kGate, .rows = spec.inner, .stored_rows = inner_};
  const LinearSpec::Part up{
      .weight = kUp, .rows = spec.inner, .stored_rows = inner_, .bias = gated() ? "" : kUpBias};
  LinearSpec outer{.parts = {up}, .cols = spec.width, .init = spec.init};
  if (gated()) {
    outer.parts = {gate, up};
  } else {
    outer.adds_bias = false;
  }
  return outer;
}

LinearSpec Mlp::down_spec(const MlpSpec& spec) const {
  return {.parts = {{.weight = kDown, .rows = spec.width, .bias = gated() ? "" : kDownBias}},
          .cols = spec.inner,
          .stored_cols = inner_,
          .init = spec.down_init,
          .alpha = spec.residual_multiplier};
}

void Mlp::add_parameters(std::vector<TensorSpec>& specs) const {
  if (kind_ == MlpKind::kNone) return;
  outer_.add_parameters(specs);
  down_.add_parameters(specs);
}

void Mlp::activate(Stream& s, const Weights& w, MlpSaved& saved) const {
  if (gated()) {
    if (down_.in_fp8(s, saved.inner_TF.tensor().rows())) saved.inner_amax_1 = amax(s, "inner amax");
    ops::run(s, ops::Swiglu{.y_TF = saved.inner_TF,
                            .gate_up_T2F = saved.outer_TN,
                            .amax_1 = saved.inner_amax_1});
  } else {
    ops::run(s, ops::BiasGelu{.y_TF = saved.inner_TF,
                              .x_TF = saved.outer_TN,
                              .b_F = outer_.bias(w),
                              .tanh_form = kind_ == MlpKind::kGeluTanh});
  }
}

void Mlp::forward(Stream& s, Tensor y_TD, const MlpInput& x, Tensor h_TD, const Weights& w,
                  MlpSaved& saved) const {
  const Tensor x_TD = x.x_TD;
  if (kind_ == MlpKind::kNone) {
    if (!y_TD.defined()) return;
    ops::run(s, ops::Copy{.y = y_TD, .x = h_TD.defined() ? h_TD : x_TD});
    if (h_TD.defined()) ops::run(s, ops::Add{.y = y_TD, .x = x_TD});
    return;
  }
  saved.outer_TN = activation(s, gated() ? "gate_up" : "up", x_TD.rows(), outer_.outputs());
  saved.inner_TF = activation(s, "inner", x_TD.rows(), inner_);
  outer_.forward(
      s, saved.outer_TN, x_TD, w,
      Linear::ForwardOptions{.amax_1 = x.amax_1, .keeps = x.keeps_x_in_fp8 ? &saved.x : nullptr});
  activate(s, w, saved);
  if (!y_TD.defined()) {
    if (x.keeps_inner_in_fp8) keep_inner(s, saved);
    return;
  }
  down_.forward(s, y_TD, saved.inner_TF, w,
                Linear::ForwardOptions{.residual_TN = h_TD,
                                       .amax_1 = saved.inner_amax_1,
                                       .keeps = x.keeps_inner_in_fp8 ? &saved.inner : nullptr});
  if (saved.inner.kept()) saved.inner_TF.release();
}

void Mlp::decode(Stream& s, Tensor y_BD, Tensor x_BD, Tensor h_BD, const Weights& w,
                 const InputNorm& norm) const {
  const Buffer inner_BF = activation(s, "inner", x_BD.rows(), inner_);
  outer_.decode(s, inner_BF, x_BD, w, {.norm = norm, .swiglu = true});
  down_.forward(s, y_BD, inner_BF, w, h_BD);
}

// Where no forward product casts it on the way.
void Mlp::keep_inner(Stream& s, MlpSaved& saved) const {
  saved.inner = down_.keep_inputs(s, saved.inner_TF, saved.inner_amax_1);
  if (saved.inner.kept()) saved.inner_TF.release();
}

void Mlp::recompute(Stream& s, const MlpInput& x, const Weights& w, MlpSaved& saved) const {
  if (kind_ == MlpKind::kNone) return;
  if (x.keeps_x_in_fp8) saved.x = outer_.keep_inputs(s, x.x_TD, x.amax_1);
  saved.inner_TF = activation(s, "inner", saved.outer_TN.tensor().rows(), inner_);
  activate(s, w, saved);
  if (x.keeps_inner_in_fp8) keep_inner(s, saved);
}

// What the two products need is large, so that each thing goes as soon as it is read: the gradient
// of the outer product lies where its output did.
void Mlp::backward(Stream& s, Tensor dx_TD, const Weights& dw, Tensor dy_TD, const MlpInput& x,
                   const Weights& w, MlpSaved& saved, Tensor dy_amax_1) const {
  if (kind_ == MlpKind::kNone) {
    ops::run(s, ops::Copy{.y = dx_TD, .x = dy_TD});
    return;
  }
  const int64_t T = dy_TD.rows();
  Buffer dinner_TF = activation(s, "dinner", T, inner_);
  down_.backward(s, dinner_TF, dw, dy_TD, saved.inner_TF, w,
                 Linear::BackwardOptions{
                     .x_amax_1 = saved.inner_amax_1, .dy_amax_1 = dy_amax_1, .kept = &saved.inner});
  saved.inner_TF.release();
  saved.inner = {};
  const Buffer douter_TN = std::move(saved.outer_TN);
  Buffer douter_amax_1;
  if (gated()) {
    if (outer_.in_fp8(s, T)) douter_amax_1 = amax(s, "dgate_up amax");
    ops::run(s, ops::SwigluBackward{.dgate_up_T2F = douter_TN,
                                    .dy_TF = dinner_TF,
                                    .gate_up_T2F = douter_TN,
                                    .amax_1 = douter_amax_1});
  } else {
    ops::run(s, ops::BiasGeluBackward{.dx_TF = douter_TN,
                                      .dy_TF = dinner_TF,
                                      .x_TF = douter_TN,
                                      .b_F = outer_.bias(w),
                                      .tanh_form = kind_ == MlpKind::kGeluTanh});
  }
  dinner_TF.release();
  outer_.backward(
      s, dx_TD, dw, douter_TN, x.x_TD, w,
      Linear::BackwardOptions{.x_amax_1 = x.amax_1, .dy_amax_1 = douter_amax_1, .kept = &saved.x});
}

}  // namespace sbtrain
