#include "model/block.h"

#include <cmath>
#include <string>
#include <utility>

#include "attention/registry.h"
#include "core/error.h"
#include "layers/activations.h"
#include "ops/memory.h"

namespace sbtrain {
namespace {

constexpr const char* kOutput = "self_attn.o_proj.weight";
constexpr const char* kOutputBias = "self_attn.o_proj.bias";

// The standard deviation of a block's matrices that are not the attention's. It is model.init_std
// rounded to f32, since the initial weights of a seed depend on its every bit.
double init_std(const ModelConfig& config) {
  return static_cast<double>(static_cast<float>(config.init_std));
}

// Projections into the residual stream start smaller, so that the stream's variance does not grow
// with depth (GPT-2).
Init into_residual(const ModelConfig& config) {
  return Init::normal(init_std(config) / std::sqrt(2.0 * static_cast<double>(config.layers)));
}

MlpSpec mlp_spec(const ModelConfig& config) {
  return {.kind = config.mlp,
          .width = config.width,
          .inner = config.inner,
          .residual_multiplier = static_cast<float>(config.residual_multiplier),
          .init = Init::normal(init_std(config)),
          .down_init = into_residual(config)};
}

}  // namespace

NormSpec norm_spec(const ModelConfig& config, std::string name) {
  return {.kind = config.norm,
          .name = std::move(name),
          .width = config.width,
          .eps = static_cast<float>(config.norm_eps)};
}

Block::Block(const ModelConfig& config, const AttentionConfig& attention, Recompute recompute)
    : width_(config.width),
      recompute_(recompute),
      attention_(make_attention(attention, config)),
      norm1_(norm_spec(config, "input_layernorm")),
      norm2_(norm_spec(config, "post_attention_layernorm")),
      mlp_(mlp_spec(config)) {
  if (attention_registry().at(attention.type).projects_output) {
    output_.emplace(LinearSpec{.parts = {{.weight = kOutput,
                                          .rows = width_,
                                          .bias = attention.output_bias ? kOutputBias : ""}},
                               .cols = mix_width(),
                               .init = into_residual(config),
                               .alpha = static_cast<float>(config.residual_multiplier)});
  }
  if (config.residual_multiplier != 1.0 && (!output_ || output_->has_bias())) {
    fail(ExitCode::kConfig,
         "model.residual_multiplier: only blocks with an output projection without bias take it");
  }
}

std::vector<TensorSpec> Block::parameters() const {
  std::vector<TensorSpec> specs;
  norm1_.add_parameters(specs);
  for (TensorSpec& spec : attention_->parameters()) specs.push_back(std::move(spec));
  if (output_) output_->add_parameters(specs);
  norm2_.add_parameters(specs);
  mlp_.add_parameters(specs);
  return specs;
}

// h_TD = x_TD + r * mix W_o^T.
void Block::add_attention(Stream& s, Tensor h_TD, Tensor mix, Tensor x_TD, const Weights& w) const {
  if (output_) return output_->forward(s, h_TD, mix, w, x_TD);
  ops::run(s, ops::Copy{.y = h_TD, .x = x_TD});
  ops::run(s, ops::Add{.y = h_TD, .x = mix});
}

void Block::forward_attention(Stream& s, Tensor x_TD, const Weights& w, BlockSaved& saved,
                              const Sequences& sequences) const {
  const int64_t T = x_TD.rows();
  saved.norm1_TD = activation(s, "norm1", T, width_);
  saved.mix_TD = activation(s, "attention.mix", T, mix_width());
  saved.h_TD = activation(s, "h", T, width_);
  saved.attention = attention_->allocate(s.memory(), T);
  norm1_.forward(s, saved.norm1_TD, x_TD, w);
  attention_->forward(s, saved.mix_TD, saved.norm1_TD, w, *saved.attention, sequences);
  add_attention(s, saved.h_TD, saved.mix_TD, x_TD, w);
}

// With an undefined y_TD (recomputation) the block's output is not computed.
void Block::forward_mlp(Stream& s, Tensor y_TD, const Weights& w, BlockSaved& saved) const {
  saved.norm2_TD = activation(s, "norm2", saved.h_TD.tensor().rows(), width_);
  norm2_.forward(s, saved.norm2_TD, saved.h_TD, w);
  mlp_.forward(s, y_TD, saved.norm2_TD, saved.h_TD, w, saved.mlp);
}

void Block::forward(Stream& s, Tensor y_TD, Tensor x_TD, const Weights& w, BlockSaved& saved,
                    const Sequences& sequences) const {
  forward_attention(s, x_TD, w, saved, sequences);
  forward_mlp(s, y_TD, w, saved);
  if (recompute_ == Recompute::kFull) saved = BlockSaved();
  if (recompute_ == Recompute::kSelective) {
    saved.norm1_TD.release();
    saved.norm2_TD.release();
    saved.mlp.inner_TF.release();
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
    norm1_.forward(s, saved.norm1_TD, x_TD, w);
    norm2_.forward(s, saved.norm2_TD, saved.h_TD, w);
    mlp_.recompute(s, w, saved.mlp);
  }

  // dx_TD becomes the gradient of h, then of x: the residual path adds without a copy.
  Buffer dnorm_TD = activation(s, "dnorm", T, width_);
  mlp_.backward(s, dnorm_TD, dw, dx_TD, saved.norm2_TD, w, saved.mlp);
  norm2_.backward(s, dx_TD, dw, dnorm_TD, saved.h_TD, w);

  Buffer dmix;
  Tensor dmix_TD = dx_TD;
  if (output_) {
    dmix = activation(s, "attention.dmix", T, mix_width());
    dmix_TD = dmix;
    output_->backward(s, dmix_TD, dw, dx_TD, saved.mix_TD, w);
  }
  attention_->backward(s, dnorm_TD, dw, dmix_TD, saved.mix_TD, saved.norm1_TD, w, *saved.attention,
                       sequences);
  norm1_.backward(s, dx_TD, dw, dnorm_TD, x_TD, w);
  saved = BlockSaved();
}

void Block::decode(Stream& s, Tensor y_BD, Tensor x_BD, const Weights& w, AttentionCache& cache,
                   const DecodeStep& step) const {
  const int64_t B = x_BD.rows();
  BlockSaved saved;
  saved.mix_TD = activation(s, "attention.mix", B, mix_width());
  saved.h_TD = activation(s, "h", B, width_);
  if (norm1_.fuses() && attention_->norms_input()) {
    DecodeStep with_norm = step;
    with_norm.norm = norm1_.fused(w);
    attention_->decode(s, saved.mix_TD, x_BD, w, cache, with_norm);
  } else {
    saved.norm1_TD = activation(s, "norm1", B, width_);
    norm1_.forward(s, saved.norm1_TD, x_BD, w);
    attention_->decode(s, saved.mix_TD, saved.norm1_TD, w, cache, step);
  }
  add_attention(s, saved.h_TD, saved.mix_TD, x_BD, w);
  if (norm2_.fuses() && mlp_.gated()) {
    mlp_.decode(s, y_BD, saved.h_TD, w, norm2_.fused(w));
  } else {
    forward_mlp(s, y_BD, w, saved);
  }
}

}  // namespace sbtrain
