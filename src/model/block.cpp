#include "model/block.h"

#include <cmath>
#include <string>
#include <utility>

#include "attention/registry.h"
#include "core/error.h"
#include "layers/activations.h"
#include "ops/fp8.h"
#include "ops/memory.h"

namespace sbtrain {
namespace {

constexpr const char* kOutput = "self_attn.o_proj.weight";
constexpr const char* kOutputBias = "self_attn.o_proj.bias";

// As transformers names the norm in front of Llama's MLP, and the one behind OLMo 2's attention.
constexpr const char* kAfterAttention = "post_attention_layernorm";

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

Buffer amax(Stream& s, const char* name) {
  return s.allocate(MemoryClass::kActivations, name, DType::kF32, {1});
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
      norms_output_(config.norm_position == NormPosition::kOutput),
      parallel_(config.parallel_residual),
      attention_(make_attention(attention, config)),
      norm1_(norm_spec(config, norms_output_ ? kAfterAttention : "input_layernorm")),
      norm2_(norm_spec(config, norms_output_ ? "post_feedforward_layernorm" : kAfterAttention)),
      mlp_(mlp_spec(config)) {
  if (attention_registry().at(attention.type).projects_output) {
    output_.emplace(LinearSpec{.parts = {{.weight = kOutput,
                                          .rows = width_,
                                          .bias = attention.output_bias ? kOutputBias : ""}},
                               .cols = mix_width(),
                               .init = into_residual(config),
                               .alpha = static_cast<float>(config.residual_multiplier)});
  }
  if (config.residual_multiplier != 1.0 && (!output_ || output_->has_bias() || norms_output_)) {
    fail(ExitCode::kConfig,
         "model.residual_multiplier: only blocks with an output projection without bias, and norms "
         "at the inputs, take it");
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

// y_TD = h_TD + norm(out_TD).
void Block::add_normed(Stream& s, Tensor y_TD, Tensor h_TD, Tensor out_TD, const Norm& norm,
                       const Weights& w) const {
  norm.forward(s, y_TD, out_TD, w);
  ops::run(s, ops::Add{.y = y_TD, .x = h_TD});
}

// y_TD = r * mix W_o^T, plus residual_TD if it is given. Both passes take the largest |mix|.
void Block::project_output(Stream& s, Tensor y_TD, const Weights& w, BlockSaved& saved,
                           Tensor residual_TD) const {
  if (output_->in_fp8(s, y_TD.rows())) {
    saved.mix_amax_1 = amax(s, "mix amax");
    ops::run(s, ops::Amax{.amax_1 = saved.mix_amax_1, .x_RC = saved.mix_TD});
  }
  output_->forward(s, y_TD, saved.mix_TD, w,
                   Linear::ForwardOptions{.residual_TN = residual_TD, .amax_1 = saved.mix_amax_1});
}

// saved.h_TD = x_TD + r * mix W_o^T, or the norm of the product.
void Block::add_attention(Stream& s, Tensor x_TD, const Weights& w, BlockSaved& saved) const {
  const Tensor h_TD = saved.h_TD;
  const Tensor mix = saved.mix_TD;
  if (norms_output_) {
    if (!output_) return add_normed(s, h_TD, x_TD, mix, norm1_, w);
    saved.attention_TD = activation(s, "attention.out", x_TD.rows(), width_);
    project_output(s, saved.attention_TD, w, saved, /*residual_TD=*/{});
    return add_normed(s, h_TD, x_TD, saved.attention_TD, norm1_, w);
  }
  if (output_) return project_output(s, h_TD, w, saved, x_TD);
  ops::run(s, ops::Copy{.y = h_TD, .x = x_TD});
  ops::run(s, ops::Add{.y = h_TD, .x = mix});
}

void Block::forward_attention(Stream& s, Tensor x_TD, const Weights& w, BlockSaved& saved,
                              const Sequences& sequences) const {
  const int64_t T = x_TD.rows();
  if (!norms_output_) saved.norm1_TD = activation(s, "norm1", T, width_);
  saved.mix_TD = activation(s, "attention.mix", T, mix_width());
  saved.h_TD = activation(s, "h", T, width_);
  saved.attention = attention_->allocate(s.memory(), T);
  if (!norms_output_) {
    if (attention_->reads_fp8(s, T)) saved.attention->x_amax_1 = amax(s, "norm1 amax");
    norm1_.forward(s, saved.norm1_TD, x_TD, w, saved.attention->x_amax_1);
  }
  attention_->forward(s, saved.mix_TD, norms_output_ ? x_TD : saved.norm1_TD.tensor(), w,
                      *saved.attention, sequences);
  add_attention(s, x_TD, w, saved);
}

// saved.norm2_TD, what the MLP reads.
void Block::normalise_for_mlp(Stream& s, Tensor x_TD, const Weights& w, BlockSaved& saved) const {
  const int64_t T = x_TD.rows();
  saved.norm2_TD = activation(s, "norm2", T, width_);
  if (mlp_.reads_fp8(s, T)) saved.norm2_amax_1 = amax(s, "norm2 amax");
  norm2_.forward(s, saved.norm2_TD, mlp_source(x_TD, saved), w, saved.norm2_amax_1);
}

// With an undefined y_TD (recomputation) the block's output is not computed. `keeps`: the backward
// pass takes what is saved as it is; where products are in fp8, it then needs their inputs no more.
void Block::forward_mlp(Stream& s, Tensor y_TD, Tensor x_TD, const Weights& w, BlockSaved& saved,
                        bool keeps) const {
  const Tensor source_TD = mlp_source(x_TD, saved);
  if (norms_output_) {
    saved.mlp_TD = activation(s, "mlp.out", x_TD.rows(), width_);
    mlp_.forward(s, saved.mlp_TD, {.x_TD = source_TD, .keeps_inner_in_fp8 = keeps}, /*h_TD=*/{}, w,
                 saved.mlp);
    if (y_TD.defined()) add_normed(s, y_TD, saved.h_TD, saved.mlp_TD, norm2_, w);
    return;
  }
  normalise_for_mlp(s, x_TD, w, saved);
  mlp_.forward(s, y_TD,
               {.x_TD = saved.norm2_TD,
                .amax_1 = saved.norm2_amax_1,
                .keeps_x_in_fp8 = keeps,
                .keeps_inner_in_fp8 = keeps},
               saved.h_TD, w, saved.mlp);
  if (saved.mlp.x.kept()) saved.norm2_TD.release();
}

void Block::forward(Stream& s, Tensor y_TD, Tensor x_TD, const Weights& w, BlockSaved& saved,
                    const Sequences& sequences) const {
  forward_attention(s, x_TD, w, saved, sequences);
  forward_mlp(s, y_TD, x_TD, w, saved, /*keeps=*/recompute_ == Recompute::kNone);
  if (recompute_ == Recompute::kFull) saved = BlockSaved();
  if (recompute_ == Recompute::kSelective) {
    saved.norm1_TD.release();
    saved.norm2_TD.release();
    saved.mlp.inner_TF.release();
  }
}

void Block::recompute(Stream& s, Tensor x_TD, const Weights& w, BlockSaved& saved,
                      const Sequences& sequences) const {
  if (recompute_ == Recompute::kFull) {
    forward_attention(s, x_TD, w, saved, sequences);
    forward_mlp(s, Tensor(), x_TD, w, saved, /*keeps=*/true);
  }
  if (recompute_ == Recompute::kSelective) {
    if (!norms_output_) {
      saved.norm1_TD = activation(s, "norm1", x_TD.rows(), width_);
      norm1_.forward(s, saved.norm1_TD, x_TD, w);
      normalise_for_mlp(s, x_TD, w, saved);
    }
    mlp_.recompute(s,
                   {.x_TD = saved.norm2_TD,
                    .amax_1 = saved.norm2_amax_1,
                    .keeps_x_in_fp8 = !norms_output_,
                    .keeps_inner_in_fp8 = true},
                   w, saved.mlp);
    if (saved.mlp.x.kept()) saved.norm2_TD.release();
  }
}

Buffer Block::before_norm(Stream& s, Tensor dy_TD, Tensor out_TD, const Norm& norm,
                          const Weights& w, const Weights& dw) const {
  Buffer dout_TD = activation(s, "dout", dy_TD.rows(), out_TD.cols());
  ops::run(s, ops::Fill{.x = dout_TD, .value = 0.0f});
  norm.backward(s, dout_TD, dw, dy_TD, out_TD, w);
  return dout_TD;
}

void Block::add_read_gradient(Stream& s, const Gradient& dx, Tensor dread_TD, Tensor source_TD,
                              const Norm& norm, const Weights& w, const Weights& dw) const {
  if (norms_output_) return ops::run(s, ops::Add{.y = dx.x_TD, .x = dread_TD});
  norm.backward(s, dx.x_TD, dw, dread_TD, source_TD, w, dx.amax_1);
}

// The gradient of what attention_ gave, from dh, that of h. Where it is dh itself nothing is
// allocated.
Buffer Block::backward_output(Stream& s, const Gradient& dh, const Weights& w, const Weights& dw,
                              const BlockSaved& saved) const {
  const Tensor dh_TD = dh.x_TD;
  Buffer dout;
  if (norms_output_) {
    dout = before_norm(s, dh_TD, output_ ? saved.attention_TD : saved.mix_TD, norm1_, w, dw);
  }
  if (!output_) return dout;
  Buffer dmix = activation(s, "attention.dmix", dh_TD.rows(), mix_width());
  output_->backward(s, dmix, dw, norms_output_ ? dout.tensor() : dh_TD, saved.mix_TD, w,
                    Linear::BackwardOptions{.x_amax_1 = saved.mix_amax_1,
                                            .dy_amax_1 = norms_output_ ? Tensor() : dh.amax_1});
  return dmix;
}

bool Block::takes_amax(const Stream& s, int64_t tokens) const {
  return !norms_output_ && (mlp_.reads_fp8(s, tokens) || (output_ && output_->in_fp8(s, tokens)));
}

void Block::backward(Stream& s, const Gradient& dx, Tensor x_TD, const Weights& w,
                     const Weights& dw, BlockSaved& saved, const Sequences& sequences) const {
  const Tensor dx_TD = dx.x_TD;
  const int64_t T = x_TD.rows();
  recompute(s, x_TD, w, saved, sequences);
  attention_->begin_backward(s, *saved.attention, sequences);

  // dx_TD becomes the gradient of h, then of x: the residual path adds without a copy.
  Buffer dread_TD = activation(s, "dnorm", T, width_);  // of what a sublayer read
  if (norms_output_) {
    const Buffer dmlp_TD = before_norm(s, dx_TD, saved.mlp_TD, norm2_, w, dw);
    mlp_.backward(s, dread_TD, dw, dmlp_TD, {.x_TD = mlp_source(x_TD, saved)}, w, saved.mlp);
  } else {
    mlp_.backward(s, dread_TD, dw, dx_TD, {.x_TD = saved.norm2_TD, .amax_1 = saved.norm2_amax_1}, w,
                  saved.mlp, dx.amax_1);
  }
  if (!parallel_) add_read_gradient(s, dx, dread_TD, saved.h_TD, norm2_, w, dw);

  Buffer dmix = backward_output(s, dx, w, dw, saved);
  if (parallel_) {
    if (!dmix.tensor().defined()) {  // the gradient of h, which dx_TD is no longer
      dmix = activation(s, "attention.dmix", T, width_);
      ops::run(s, ops::Copy{.y = dmix, .x = dx_TD});
    }
    add_read_gradient(s, {.x_TD = dx_TD}, dread_TD, x_TD, norm2_, w, dw);
  }
  attention_->backward(s, dread_TD, dw, dmix.tensor().defined() ? dmix.tensor() : dx_TD,
                       saved.mix_TD, norms_output_ ? x_TD : saved.norm1_TD.tensor(), w,
                       *saved.attention, sequences);
  add_read_gradient(s, dx, dread_TD, x_TD, norm1_, w, dw);
  saved = BlockSaved();
}

void Block::decode_mlp(Stream& s, Tensor y_BD, Tensor x_BD, const Weights& w,
                       BlockSaved& saved) const {
  const bool fuses = mlp_.gated() && (norms_output_ || norm2_.fuses());
  if (!fuses) return forward_mlp(s, y_BD, x_BD, w, saved, /*keeps=*/false);
  const Tensor source_BD = mlp_source(x_BD, saved);
  if (!norms_output_) return mlp_.decode(s, y_BD, source_BD, saved.h_TD, w, norm2_.fused(w));
  saved.mlp_TD = activation(s, "mlp.out", x_BD.rows(), width_);
  mlp_.decode(s, saved.mlp_TD, source_BD, /*h_BD=*/{}, w, /*norm=*/{});
  add_normed(s, y_BD, saved.h_TD, saved.mlp_TD, norm2_, w);
}

void Block::decode(Stream& s, Tensor y_BD, Tensor x_BD, const Weights& w, AttentionCache& cache,
                   const DecodeStep& step) const {
  const int64_t B = x_BD.rows();
  BlockSaved saved;
  saved.mix_TD = activation(s, "attention.mix", B, mix_width());
  saved.h_TD = activation(s, "h", B, width_);
  if (norms_output_) {
    attention_->decode(s, saved.mix_TD, x_BD, w, cache, step);
  } else if (norm1_.fuses() && attention_->norms_input()) {
    DecodeStep with_norm = step;
    with_norm.norm = norm1_.fused(w);
    attention_->decode(s, saved.mix_TD, x_BD, w, cache, with_norm);
  } else {
    saved.norm1_TD = activation(s, "norm1", B, width_);
    norm1_.forward(s, saved.norm1_TD, x_BD, w);
    attention_->decode(s, saved.mix_TD, saved.norm1_TD, w, cache, step);
  }
  add_attention(s, x_BD, w, saved);
  decode_mlp(s, y_BD, x_BD, w, saved);
}

}  // namespace sbtrain
