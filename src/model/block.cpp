#include <cmath>

#include "core/error.h"
#include "model/llama.h"
#include "ops/ops.h"

namespace sbtrain {
namespace {

// Widths that are no multiple of 8 run at a third of the speed; they are stored padded to 64.
int64_t fast_inner(int64_t inner) {
  return inner % 8 == 0 ? inner : (inner + 63) / 64 * 64;
}

Buffer activation(Stream& s, std::string_view name, int64_t rows, int64_t cols) {
  return s.memory().allocate(MemoryClass::kActivations, name, s.memory().compute_dtype(),
                             {rows, cols});
}

}  // namespace

Recompute parse_recompute(std::string_view name) {
  if (name == "none") return Recompute::kNone;
  if (name == "selective") return Recompute::kSelective;
  if (name == "full") return Recompute::kFull;
  fail(ExitCode::kConfig, "train.recompute: '{}' is not one of none, selective, full", name);
}

Block::Block(const ModelConfig& config, const AttentionConfig& attention, Recompute recompute)
    : layers_(config.layers),
      width_(config.width),
      inner_(fast_inner(config.inner)),
      logical_inner_(config.inner),
      eps_(static_cast<float>(config.norm_eps)),
      residual_(static_cast<float>(config.residual_multiplier)),
      init_std_(static_cast<float>(config.init_std)),
      recompute_(recompute),
      attention_(make_attention(attention, config)) {}

std::vector<TensorSpec> Block::parameters() const {
  const int64_t d = width_;
  const int64_t f = logical_inner_;
  const Init matrix = Init::normal(init_std_);
  // Projections into the residual stream start smaller, so that its variance does not grow with
  // depth (GPT-2).
  const Init into_residual =
      Init::normal(init_std_ / std::sqrt(2.0 * static_cast<double>(layers_)));
  std::vector<TensorSpec> specs;
  specs.push_back(
      {.name = "input_layernorm.weight", .shape = {d}, .storage = {}, .init = Init::constant(1)});
  for (TensorSpec& spec : attention_->parameters()) specs.push_back(std::move(spec));
  specs.push_back({.name = "self_attn.o_proj.weight",
                   .shape = {d, d},
                   .storage = {},
                   .init = into_residual,
                   .decay = true});
  specs.push_back({.name = "post_attention_layernorm.weight",
                   .shape = {d},
                   .storage = {},
                   .init = Init::constant(1)});
  specs.push_back({.name = "mlp.gate_proj.weight",
                   .shape = {f, d},
                   .storage = {inner_, d},
                   .init = matrix,
                   .decay = true});
  specs.push_back({.name = "mlp.up_proj.weight",
                   .shape = {f, d},
                   .storage = {inner_, d},
                   .init = matrix,
                   .decay = true,
                   .fused = true});
  specs.push_back({.name = "mlp.down_proj.weight",
                   .shape = {d, f},
                   .storage = {d, inner_},
                   .init = into_residual,
                   .decay = true});
  return specs;
}

void Block::forward_attention(Stream& s, Tensor x_TD, const Weights& w, BlockSaved& saved,
                              const Sequences& sequences) const {
  const int64_t T = x_TD.rows();
  saved.norm1_TD = activation(s, "norm1", T, width_);
  saved.mix_TD = activation(s, "attention.mix", T, width_);
  saved.h_TD = activation(s, "h", T, width_);
  saved.attention = attention_->allocate(s.memory(), T);
  ops::rmsnorm(s, saved.norm1_TD, x_TD, w.at("input_layernorm.weight"), eps_);
  attention_->forward(s, saved.mix_TD, saved.norm1_TD, w, *saved.attention, sequences);
  ops::linear(s, saved.h_TD, saved.mix_TD, w.at("self_attn.o_proj.weight"),
              {.alpha = residual_, .residual = x_TD});
}

// With an undefined y_TD (recomputation) the block's output is not formed.
void Block::forward_mlp(Stream& s, Tensor y_TD, const Weights& w, BlockSaved& saved) const {
  const int64_t T = saved.h_TD.tensor().rows();
  saved.norm2_TD = activation(s, "norm2", T, width_);
  saved.gate_up_T2F = activation(s, "gate_up", T, 2 * inner_);
  saved.inner_TF = activation(s, "inner", T, inner_);
  ops::rmsnorm(s, saved.norm2_TD, saved.h_TD, w.at("post_attention_layernorm.weight"), eps_);
  ops::linear(s, saved.gate_up_T2F, saved.norm2_TD, w.fused("mlp.gate_proj.weight", 2));
  ops::swiglu(s, saved.inner_TF, saved.gate_up_T2F);
  if (!y_TD.defined()) return;
  ops::linear(s, y_TD, saved.inner_TF, w.at("mlp.down_proj.weight"),
              {.alpha = residual_, .residual = saved.h_TD});
}

void Block::forward(Stream& s, Tensor y_TD, Tensor x_TD, const Weights& w, BlockSaved& saved,
                    const Sequences& sequences) const {
  forward_attention(s, x_TD, w, saved, sequences);
  forward_mlp(s, y_TD, w, saved);
  if (recompute_ == Recompute::kFull) saved = BlockSaved();
  if (recompute_ == Recompute::kSelective) {
    saved.norm1_TD.release();
    saved.norm2_TD.release();
    saved.inner_TF.release();
  }
}

void Block::backward(Stream& s, Tensor dx_TD, Tensor x_TD, const Weights& w, const Weights& dw,
                     BlockSaved& saved, const Sequences& sequences) const {
  const int64_t T = x_TD.rows();
  if (recompute_ == Recompute::kFull) {
    forward_attention(s, x_TD, w, saved, sequences);
    forward_mlp(s, Tensor(), w, saved);
  }
  if (recompute_ == Recompute::kSelective) {
    saved.norm1_TD = activation(s, "norm1", T, width_);
    saved.norm2_TD = activation(s, "norm2", T, width_);
    saved.inner_TF = activation(s, "inner", T, inner_);
    ops::rmsnorm(s, saved.norm1_TD, x_TD, w.at("input_layernorm.weight"), eps_);
    ops::rmsnorm(s, saved.norm2_TD, saved.h_TD, w.at("post_attention_layernorm.weight"), eps_);
    ops::swiglu(s, saved.inner_TF, saved.gate_up_T2F);
  }

  Buffer dinner_TF = activation(s, "dinner", T, inner_);
  Buffer dgate_up_T2F = activation(s, "dgate_up", T, 2 * inner_);
  Buffer dnorm_TD = activation(s, "dnorm", T, width_);
  ops::linear_backward_weight(s, dw.at("mlp.down_proj.weight"), dx_TD, saved.inner_TF, residual_);
  ops::linear_backward_input(s, dinner_TF, dx_TD, w.at("mlp.down_proj.weight"), residual_);
  ops::swiglu_backward(s, dgate_up_T2F, dinner_TF, saved.gate_up_T2F);
  ops::linear_backward_weight(s, dw.fused("mlp.gate_proj.weight", 2), dgate_up_T2F, saved.norm2_TD);
  ops::linear_backward_input(s, dnorm_TD, dgate_up_T2F, w.fused("mlp.gate_proj.weight", 2));
  // dx_TD becomes the gradient of h: the residual path adds without a copy.
  ops::rmsnorm_backward(s, dx_TD, dw.at("post_attention_layernorm.weight"), dnorm_TD, saved.h_TD,
                        w.at("post_attention_layernorm.weight"), eps_);
  dinner_TF.release();
  dgate_up_T2F.release();

  Buffer dmix_TD = activation(s, "attention.dmix", T, width_);
  ops::linear_backward_weight(s, dw.at("self_attn.o_proj.weight"), dx_TD, saved.mix_TD, residual_);
  ops::linear_backward_input(s, dmix_TD, dx_TD, w.at("self_attn.o_proj.weight"), residual_);
  attention_->backward(s, dnorm_TD, dw, dmix_TD, saved.mix_TD, saved.norm1_TD, w, *saved.attention,
                       sequences);
  ops::rmsnorm_backward(s, dx_TD, dw.at("input_layernorm.weight"), dnorm_TD, x_TD,
                        w.at("input_layernorm.weight"), eps_);
  saved = BlockSaved();
}

void Block::decode(Stream& s, Tensor y_BD, Tensor x_BD, const Weights& w, AttentionCache& cache,
                   const DecodeStep& step) const {
  const int64_t B = x_BD.rows();
  BlockSaved saved;
  saved.norm1_TD = activation(s, "norm1", B, width_);
  saved.mix_TD = activation(s, "attention.mix", B, width_);
  saved.h_TD = activation(s, "h", B, width_);
  ops::rmsnorm(s, saved.norm1_TD, x_BD, w.at("input_layernorm.weight"), eps_);
  attention_->decode(s, saved.mix_TD, saved.norm1_TD, w, cache, step);
  ops::linear(s, saved.h_TD, saved.mix_TD, w.at("self_attn.o_proj.weight"),
              {.alpha = residual_, .residual = x_BD});
  forward_mlp(s, y_BD, w, saved);
}

}  // namespace sbtrain
