// One block of the model, in the pre-norm layout of Llama 2 (arXiv 2307.09288):
//   h = x + r * attention(norm(x)) W_o^T;   y = h + r * mlp(norm(h))
// r is model.residual_multiplier. The configuration chooses the norm, the MLP and the attention
// module, which may do without the output projection W_o. It changes the layout as well:
//   norm_position output (OLMo 2, arXiv 2501.00656):
//     h = x + norm(attention(x) W_o^T);     y = h + norm(mlp(h))
//   parallel_residual (GPT-NeoX, arXiv 2204.06745): the MLP reads x where it reads h above.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "core/sequences.h"
#include "core/stream.h"
#include "core/weights.h"
#include "layers/linear.h"
#include "layers/mlp.h"
#include "layers/norm.h"
#include "model/model_config.h"

namespace sbtrain {

// The norm of that name, of the kind that the model has: <name>.weight, and <name>.bias of
// LayerNorm.
NormSpec norm_spec(const ModelConfig& config, std::string name);

// What a block's forward pass leaves for its backward pass: norm1_TD and norm2_TD are what the
// sublayers read, where norms stand at their inputs; attention_TD (where there is W_o) and mlp_TD
// what they gave, where norms stand at their outputs.
struct BlockSaved {
  Buffer norm1_TD, mix_TD, h_TD, norm2_TD;
  Buffer attention_TD, mlp_TD;
  // Where products are in fp8: the largest absolute values.
  Buffer mix_amax_1, norm2_amax_1;
  MlpSaved mlp;
  std::unique_ptr<AttentionSaved> attention;
};

// The gradient of the residual stream, on its way back.
struct Gradient {
  Tensor x_TD;
  Tensor amax_1{};  // f32, where Block::takes_amax(): the largest |x|
};

class Block {
 public:
  Block(const ModelConfig& config, const AttentionConfig& attention, Recompute recompute);

  std::vector<TensorSpec> parameters() const;

  // y_TD = block(x_TD). `saved` keeps what the recompute policy prescribes.
  void forward(Stream& s, Tensor y_TD, Tensor x_TD, const Weights& w, BlockSaved& saved,
               const Sequences& sequences) const;

  // dx holds the gradient of y on entry and of x on return. Adds to the gradients in `dw` and
  // consumes `saved`.
  void backward(Stream& s, const Gradient& dx, Tensor x_TD, const Weights& w, const Weights& dw,
                BlockSaved& saved, const Sequences& sequences) const;
  // Whether backward() multiplies dx of as many tokens in fp8, and so takes its amax_1. It does not
  // where norms at the sublayers' outputs come before the products.
  bool takes_amax(const Stream& s, int64_t tokens) const;

  // One new token of each of B sequences; y_BD must not be x_BD.
  void decode(Stream& s, Tensor y_BD, Tensor x_BD, const Weights& w, AttentionCache& cache,
              const DecodeStep& step) const;

  const Attention& attention() const { return *attention_; }
  int64_t stored_inner() const { return mlp_.stored_inner(); }

 private:
  void forward_attention(Stream& s, Tensor x_TD, const Weights& w, BlockSaved& saved,
                         const Sequences& sequences) const;
  void add_attention(Stream& s, Tensor x_TD, const Weights& w, BlockSaved& saved) const;
  void project_output(Stream& s, Tensor y_TD, const Weights& w, BlockSaved& saved,
                      Tensor residual_TD) const;
  void forward_mlp(Stream& s, Tensor y_TD, Tensor x_TD, const Weights& w, BlockSaved& saved,
                   bool keeps) const;
  void normalise_for_mlp(Stream& s, Tensor x_TD, const Weights& w, BlockSaved& saved) const;
  // Computes again what the policy has released.
  void recompute(Stream& s, Tensor x_TD, const Weights& w, BlockSaved& saved,
                 const Sequences& sequences) const;
  Buffer backward_output(Stream& s, const Gradient& dh, const Weights& w, const Weights& dw,
                         const BlockSaved& saved) const;
  void decode_mlp(Stream& s, Tensor y_BD, Tensor x_BD, const Weights& w, BlockSaved& saved) const;
  int64_t mix_width() const { return attention_->mix_width(width_); }
  // What comes before the norm of the MLP: x_TD is the input of the block.
  Tensor mlp_source(Tensor x_TD, const BlockSaved& saved) const {
    return parallel_ ? x_TD : saved.h_TD.tensor();
  }
  // y_TD = h_TD + norm(out_TD).
  void add_normed(Stream& s, Tensor y_TD, Tensor h_TD, Tensor out_TD, const Norm& norm,
                  const Weights& w) const;
  // The gradient of what the norm at a sublayer's output took, from dy_TD, that of the stream.
  Buffer before_norm(Stream& s, Tensor dy_TD, Tensor out_TD, const Norm& norm, const Weights& w,
                     const Weights& dw) const;
  // Adds to dx, the gradient of source_TD, what follows from that of what a sublayer read.
  void add_read_gradient(Stream& s, const Gradient& dx, Tensor dread_TD, Tensor source_TD,
                         const Norm& norm, const Weights& w, const Weights& dw) const;

  int64_t width_;
  Recompute recompute_;
  bool norms_output_;  // NormPosition::kOutput
  bool parallel_;
  std::unique_ptr<Attention> attention_;
  std::optional<Linear> output_;  // of the attention, if its module has one
  Norm norm1_, norm2_;
  Mlp mlp_;
};

}  // namespace sbtrain
