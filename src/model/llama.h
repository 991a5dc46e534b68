// The Llama 2 layout: pre-norm RMSNorm, attention, SwiGLU, no biases; tied or untied head.
//   h = x + r * attention(norm(x)) W_o^T;   y = h + r * swiglu(norm(h) W_gu^T) W_down^T
// r is model.residual_multiplier (1 in Llama). The configuration exchanges parts of it: the norm,
// the MLP, learned positions, and modules that go without an output projection.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "attention/attention.h"
#include "config/config.h"
#include "core/sequences.h"
#include "core/stream.h"
#include "model/layers.h"
#include "model/params.h"

namespace sbtrain {

// What the backward pass computes again instead of keeping.
enum class Recompute : uint8_t {
  kNone,
  kSelective,  // norms and activations
  kFull,       // everything but the blocks' inputs
};
Recompute parse_recompute(std::string_view name);

// What a block's forward pass leaves for its backward pass.
struct BlockSaved {
  Buffer norm1_TD, mix_TD, h_TD, norm2_TD;
  MlpSaved mlp;
  std::unique_ptr<AttentionSaved> attention;
};

class Block {
 public:
  Block(const ModelConfig& config, const AttentionConfig& attention, Recompute recompute);

  std::vector<TensorSpec> parameters() const;

  // y_TD = block(x_TD). `saved` keeps what the recompute policy says.
  void forward(Stream& s, Tensor y_TD, Tensor x_TD, const Weights& w, BlockSaved& saved,
               const Sequences& sequences) const;

  // dx_TD holds the gradient of y on entry and of x on return. Adds to the gradients in `dw`,
  // consumes `saved`.
  void backward(Stream& s, Tensor dx_TD, Tensor x_TD, const Weights& w, const Weights& dw,
                BlockSaved& saved, const Sequences& sequences) const;

  // One new token of each of B sequences; y_BD may not be x_BD.
  void decode(Stream& s, Tensor y_BD, Tensor x_BD, const Weights& w, AttentionCache& cache,
              const DecodeStep& step) const;

  const Attention& attention() const { return *attention_; }
  int64_t stored_inner() const { return mlp_.stored_inner(); }

 private:
  void forward_attention(Stream& s, Tensor x_TD, const Weights& w, BlockSaved& saved,
                         const Sequences& sequences) const;
  void add_attention(Stream& s, Tensor h_TD, Tensor mix, Tensor x_TD, const Weights& w) const;
  void forward_mlp(Stream& s, Tensor y_TD, const Weights& w, BlockSaved& saved) const;
  int64_t mix_width() const { return attention_->mix_width(width_); }

  int64_t layers_, width_;
  float residual_, init_std_;
  Recompute recompute_;
  std::unique_ptr<Attention> attention_;
  bool projects_, output_bias_;  // what becomes of the attention's output
  Norm norm1_, norm2_;
  Mlp mlp_;
};

// One micro-batch on the device.
struct BatchTensors {
  Tensor tokens_T, targets_T;  // i32
  Sequences sequences;
  int64_t tokens() const { return tokens_T.rows(); }
};

// Caches of all layers for B sequences of at most `capacity` tokens.
struct DecodeCache {
  std::vector<std::unique_ptr<AttentionCache>> layers;
};

class Llama {
 public:
  // `world` sets the padding of units for sharding.
  explicit Llama(const ModelConfig& config, Recompute recompute = Recompute::kNone, int world = 1);

  const ModelConfig& config() const { return config_; }
  const ParamRegistry& registry() const { return registry_; }
  const Block& block(int layer) const { return blocks_[layer]; }

  // Forward and backward pass of one micro-batch. The objective is
  // loss_weight * sum_t (loss_t + z_loss lse_t^2); its gradients are added to params.gradients().
  // loss_T (f32) receives each token's loss in nats, 0 where the target is ignored.
  void forward_backward(Stream& s, ParamAccess& params, const BatchTensors& batch, Tensor loss_T,
                        float loss_weight, float z_loss) const;

  // Forward pass alone: each token's loss and, with hits_T, whether its target was the likeliest
  // token (ops::CrossEntropy).
  void evaluate(Stream& s, ParamAccess& params, const BatchTensors& batch, Tensor loss_T,
                Tensor hits_T = {}) const;

  // Forward pass: logits_TV (f32) of every token.
  void logits(Stream& s, ParamAccess& params, const BatchTensors& batch, Tensor logits_TV) const;

  DecodeCache allocate_cache(Memory& memory, int64_t sequences, int64_t capacity) const;
  // Runs the one document of `batch` as the prompt of sequence b; logits_1V are those that follow
  // its last token.
  void prefill(Stream& s, ParamAccess& params, const BatchTensors& batch, DecodeCache& cache,
               int64_t b, Tensor logits_1V) const;
  // One new token for each sequence: logits_BV.
  void decode(Stream& s, ParamAccess& params, Tensor tokens_B, DecodeCache& cache,
              const DecodeStep& step, Tensor logits_BV) const;

  // Forward pass of one document: visit(layer, head, map) for every head of every layer whose
  // attention weighs keys, in order.
  using MapVisit = std::function<void(int64_t layer, int64_t head, const AttentionMap& map)>;
  void attention_maps(Stream& s, ParamAccess& params, const BatchTensors& batch,
                      const MapVisit& visit) const;

  // Floating-point operations of training one token, forward and backward, recomputation not
  // counted: 6 N for all N parameters, and attention over `keys` keys. keys = L/2 counts the
  // causal half, keys = L the full square.
  double flops_per_token(double keys) const;

 private:
  int embedding_unit() const { return 0; }
  int block_unit(int64_t layer) const { return static_cast<int>(layer) + 1; }
  int head_unit() const { return static_cast<int>(config_.layers) + 1; }
  int shared_unit() const { return head_unit() + 1; }  // what layers share, where they do
  bool has_shared() const { return shared_unit() < static_cast<int>(registry_.units().size()); }
  // A pass holds what layers share from its first block to its last.
  void gather_shared(ParamAccess& params) const;
  void release_shared(ParamAccess& params) const;
  const Weights* shared_weights(ParamAccess& params) const;
  const Tensor& head_weight(ParamAccess& params) const;
  bool has_positions() const { return config_.position == "learned"; }
  // Throws ExitCode::kConfig where learned positions do not reach that far.
  void check_length(int64_t tokens) const;
  void embed(Stream& s, ParamAccess& params, Tensor x_TD, Tensor tokens_T,
             Tensor positions_T) const;
  void project(Stream& s, ParamAccess& params, Tensor x_TD, Tensor logits_TV) const;
  // The blocks without a backward pass to come; x_TD is updated in place. visit(layer, weights,
  // saved) sees each layer's attention before it is dropped.
  template <typename Visit>
  void run_blocks(Stream& s, ParamAccess& params, const BatchTensors& batch, Buffer& x_TD,
                  Visit visit) const;

  ModelConfig config_;
  ParamRegistry registry_;
  std::vector<Block> blocks_;
  Norm final_norm_;
};

}  // namespace sbtrain
