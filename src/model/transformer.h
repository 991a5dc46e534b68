// The whole model: embedding, blocks, final norm, and a head that is tied to the embedding or has
// weights of its own. The passes say when the weights of each unit are gathered and released and
// when its gradients are complete, so that they read the same for any number of ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "attention/attention.h"
#include "core/sequences.h"
#include "core/stream.h"
#include "layers/linear.h"
#include "layers/norm.h"
#include "model/block.h"
#include "model/block_inputs.h"
#include "model/model_config.h"
#include "model/params.h"

namespace sbtrain {

// The tokens that a pass begins with, and where they stand in their documents.
struct PassInput {
  Tensor tokens_T, positions_T;  // i32
};

// One micro-batch on the device.
struct BatchTensors {
  Tensor tokens_T, targets_T;  // i32
  Sequences sequences;
  // Where only some tokens have a target, which tokens these are: logits of the others are not
  // computed, and targets, losses and hits are those of these S tokens. rows_S has their places,
  // slots_T for each token its place in rows_S, or S. Undefined: S = T.
  Tensor rows_S{}, slots_T{};  // i32
  int64_t tokens() const { return tokens_T.rows(); }
  PassInput input() const { return {.tokens_T = tokens_T, .positions_T = sequences.positions_T}; }
};

class Transformer {
 public:
  // `world` sets the padding of units for sharding.
  explicit Transformer(const ModelConfig& config, Recompute recompute = Recompute::kNone,
                       int world = 1);

  const ModelConfig& config() const { return config_; }
  const ParamRegistry& registry() const { return registry_; }
  const Block& block(int layer) const { return blocks_[layer]; }

  // Forward and backward pass of one micro-batch. The objective is
  // loss_weight * sum_t (loss_t + z_loss lse_t^2); its gradients are added to params.gradients().
  // loss_T (f32) receives each token's loss in nats, or that of each of batch.rows_S, 0 where the
  // target is ignored. With `offload` the inputs of blocks are in its memory between the two
  // passes.
  void forward_backward(Stream& s, ParamAccess& params, const BatchTensors& batch, Tensor loss_T,
                        float loss_weight, float z_loss,
                        ActivationOffload* offload = nullptr) const;

  // Only the forward pass: each token's loss and, with hits_T, whether its target was the likeliest
  // token (ops::CrossEntropy).
  void evaluate(Stream& s, ParamAccess& params, const BatchTensors& batch, Tensor loss_T,
                Tensor hits_T = {}) const;

  // Only the forward pass: logits_TV (f32) of every token.
  void logits(Stream& s, ParamAccess& params, const BatchTensors& batch, Tensor logits_TV) const;

  // Floating-point operations of training on one token, forward and backward, without
  // recomputation: 6 N for all N parameters, and attention over `keys` keys. keys = L/2 counts the
  // causal half, keys = L the full square. Those of the head count for the share of tokens
  // `with_target`.
  double flops_per_token(double keys, double with_target = 1.0) const;

  // The parts of a pass, for those of model/inference/. Weights of a unit are gathered while the
  // one before it computes; the last block gathers the head, which its last user releases.

  struct BlockRange {
    int64_t begin = 0;
    int64_t end = 0;
  };
  BlockRange all_blocks() const { return {.begin = 0, .end = config_.layers}; }
  Buffer embedding_buffer(Stream& s, int64_t tokens) const;
  // Runs blocks one after the other: run(layer, y_TD, x_TD, w) computes one from its input, which
  // it may keep. With the first block the embedding is put into x_TD, which becomes the output.
  using RunBlock =
      std::function<void(int64_t layer, const Tensor& y_TD, Buffer& x_TD, const Weights& w)>;
  void run_blocks(Stream& s, ParamAccess& params, const PassInput& input, Buffer& x_TD,
                  BlockRange blocks, const RunBlock& run) const;
  // The forward pass of blocks that no backward pass follows. visit(layer, weights, saved) sees
  // what each layer's attention saved, and may take it, before it is released.
  using VisitBlock =
      std::function<void(int64_t layer, const Weights& w, std::unique_ptr<AttentionSaved>& saved)>;
  void forward(Stream& s, ParamAccess& params, const BatchTensors& batch, Buffer& x_TD,
               BlockRange blocks, const VisitBlock& visit = nullptr) const;

  void gather_head(ParamAccess& params) const;
  void release_head(ParamAccess& params) const;
  // Of the blocks' output x_TD.
  Buffer final_norm(Stream& s, ParamAccess& params, Tensor x_TD) const;
  void logits_of(Stream& s, ParamAccess& params, Tensor logits_TV, Tensor norm_TD) const;
  // Both; releases the head.
  void project(Stream& s, ParamAccess& params, Tensor x_TD, Tensor logits_TV) const;
  // The same for the tokens of a decode step.
  void project_decoded(Stream& s, ParamAccess& params, Tensor x_BD, Tensor logits_BV) const;

 private:
  int embedding_unit() const { return 0; }
  int block_unit(int64_t layer) const { return static_cast<int>(layer) + 1; }
  int head_unit() const { return static_cast<int>(config_.layers) + 1; }
  // The unit of the head's weights: its own, or the embedding's.
  int head_table() const { return config_.tied ? embedding_unit() : head_unit(); }
  int shared_unit() const { return head_unit() + 1; }  // what layers share, if they do
  bool has_shared() const { return shared_unit() < static_cast<int>(registry_.units().size()); }
  // A pass keeps what layers share gathered from its first block to its last.
  void gather_shared(ParamAccess& params) const;
  void release_shared(ParamAccess& params) const;
  const Weights* shared_weights(ParamAccess& params) const;
  void gather_after(ParamAccess& params, int64_t layer) const;
  bool has_positions() const { return config_.position == PositionEmbedding::kLearned; }
  // Throws ExitCode::kConfig for more tokens than the model has learned positions.
  void check_length(int64_t tokens) const;
  // The embedding unit must have been gathered and is released here.
  void embed(Stream& s, ParamAccess& params, Tensor x_TD, Tensor tokens_T,
             Tensor positions_T) const;
  // Begins a pass at a block: gathers it, and embeds the input before the first.
  void enter(Stream& s, ParamAccess& params, const PassInput& input, Tensor x_TD,
             int64_t block) const;
  // The loop over blocks that every pass shares. `keeps_last`: the last block's weights stay
  // gathered.
  template <typename Run>
  void for_each_block(Stream& s, ParamAccess& params, Buffer& x_TD, BlockRange blocks,
                      bool keeps_last, const Run& run) const;
  // The rows of x_TD at batch.rows_S.
  Buffer rows_with_target(Stream& s, const BatchTensors& batch, Tensor x_TD) const;
  // From the blocks' output x_TD to the loss and back: dx becomes the gradient of x_TD.
  void loss_and_gradient(Stream& s, ParamAccess& params, const Gradient& dx, Tensor x_TD,
                         const BatchTensors& batch, Tensor loss_T, float loss_weight,
                         float z_loss) const;
  void embed_backward(Stream& s, ParamAccess& params, Tensor dx_TD,
                      const BatchTensors& batch) const;

  ModelConfig config_;
  ParamRegistry registry_;
  std::vector<Block> blocks_;
  Norm final_norm_;
  Linear head_;
};

}  // namespace sbtrain
