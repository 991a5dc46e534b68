// The whole model: embedding, blocks, final norm, and a head that is tied to the embedding or has
// weights of its own. The passes say when the weights of each unit are gathered and released and
// when its gradients are complete, so that they read the same for any number of ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "attention/attention.h"
#include "core/sequences.h"
#include "core/stream.h"
#include "layers/linear.h"
#include "layers/norm.h"
#include "model/block.h"
#include "model/decode_cache.h"
#include "model/model_config.h"
#include "model/params.h"

namespace sbtrain {

// One micro-batch on the device.
struct BatchTensors {
  Tensor tokens_T, targets_T;  // i32
  Sequences sequences;
  int64_t tokens() const { return tokens_T.rows(); }
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
  // loss_T (f32) receives each token's loss in nats, 0 where the target is ignored.
  void forward_backward(Stream& s, ParamAccess& params, const BatchTensors& batch, Tensor loss_T,
                        float loss_weight, float z_loss) const;

  // Only the forward pass: each token's loss and, with hits_T, whether its target was the likeliest
  // token (ops::CrossEntropy).
  void evaluate(Stream& s, ParamAccess& params, const BatchTensors& batch, Tensor loss_T,
                Tensor hits_T = {}) const;

  // Only the forward pass: logits_TV (f32) of every token.
  void logits(Stream& s, ParamAccess& params, const BatchTensors& batch, Tensor logits_TV) const;

  // A cache for `sequences` sequences of at most `capacity` tokens.
  DecodeCache allocate_cache(Memory& memory, int64_t sequences, int64_t capacity) const;
  // Runs the one document of `batch` as the prompt of sequence b; logits_1V are those of the token
  // that follows the prompt.
  void prefill(Stream& s, ParamAccess& params, const BatchTensors& batch, DecodeCache& cache,
               int64_t b, Tensor logits_1V) const;
  // The same, and visit(first, logits_NV) sees the logits of the prompt's tokens [first, first +
  // N), from the first to the last, N of at most C at once: rows of logits_CV, whose row 0 is then
  // that of the token that follows the prompt.
  using LogitsVisit = std::function<void(int64_t first, const Tensor& logits_NV)>;
  void prefill(Stream& s, ParamAccess& params, const BatchTensors& batch, DecodeCache& cache,
               int64_t b, Tensor logits_CV, const LogitsVisit& visit) const;
  // A prompt that runs a few layers at a time, between which the model may do other work: all of
  // its tokens go through one layer after the other, so that the results have the bits of
  // prefill().
  struct PartialPrefill {
    BatchTensors batch;  // one document
    Buffer x_TD;         // the input of the next block, or the last one's output
    // Of the blocks that have run. The cache is filled in the end only, because decode steps write
    // to the parts of all sequences.
    std::vector<std::unique_ptr<AttentionSaved>> saved;
    int64_t row = 0;  // the first token whose logits have not been seen
  };
  // Runs up to `layers` more of the blocks. Returns whether all have run.
  bool prefill_layers(Stream& s, ParamAccess& params, PartialPrefill& prompt, int64_t layers) const;
  // After the last block: visit(first, logits_NV) for up to `rows` more tokens, as prefill() does.
  // Returns whether all have been seen.
  bool prefill_rows(Stream& s, ParamAccess& params, PartialPrefill& prompt, int64_t rows,
                    Tensor logits_CV, const LogitsVisit& visit) const;
  // After the last block: fills the cache of sequence b; logits_1V are those of the token that
  // follows the prompt.
  void finish_prefill(Stream& s, ParamAccess& params, PartialPrefill& prompt, DecodeCache& cache,
                      int64_t b, Tensor logits_1V) const;
  // One new token for each of the first B sequences of the cache: logits_BV.
  void decode(Stream& s, ParamAccess& params, Tensor tokens_B, DecodeCache& cache,
              const DecodeStep& step, Tensor logits_BV) const;

  // Runs the forward pass of one document and calls visit(layer, head, map), in order, for every
  // head of every layer whose attention weighs keys, or of those for which wanted(layer, head).
  using MapVisit = std::function<void(int64_t layer, int64_t head, const AttentionMap& map)>;
  using MapWanted = std::function<bool(int64_t layer, int64_t head)>;
  void attention_maps(Stream& s, ParamAccess& params, const BatchTensors& batch,
                      const MapVisit& visit, const MapWanted& wanted = nullptr) const;

  // Runs the forward pass and returns what each layer's attention has read of the keys.
  std::vector<KeysRead> keys_read(Stream& s, ParamAccess& params, const BatchTensors& batch) const;

  // Floating-point operations of training on one token, forward and backward, without
  // recomputation: 6 N for all N parameters, and attention over `keys` keys. keys = L/2 counts the
  // causal half, keys = L the full square.
  double flops_per_token(double keys) const;

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
  void gather_head(ParamAccess& params) const;
  void release_head(ParamAccess& params) const;
  bool has_positions() const { return config_.position == PositionEmbedding::kLearned; }
  // Throws ExitCode::kConfig for more tokens than the model has learned positions.
  void check_length(int64_t tokens) const;
  // The embedding unit must have been gathered and is released here.
  void embed(Stream& s, ParamAccess& params, Tensor x_TD, Tensor tokens_T,
             Tensor positions_T) const;
  void project(Stream& s, ParamAccess& params, Tensor x_TD, Tensor logits_TV) const;
  // Runs the blocks over a prompt and fills the cache of sequence b; x_TD becomes their output.
  void prefill_blocks(Stream& s, ParamAccess& params, const BatchTensors& batch, DecodeCache& cache,
                      int64_t b, Buffer& x_TD) const;
  // Runs the blocks when no backward pass follows; x_TD is updated in place. visit(layer, weights,
  // saved) sees what each layer's attention saved, and may take it, before it is released. The last
  // block gathers the head.
  template <typename Visit>
  void run_blocks(Stream& s, ParamAccess& params, const BatchTensors& batch, Buffer& x_TD,
                  Visit visit) const;
  // The same for the blocks [begin, end). With the first one the embedding is put into x_TD.
  template <typename Visit>
  void run_blocks(Stream& s, ParamAccess& params, const BatchTensors& batch, Buffer& x_TD,
                  int64_t begin, int64_t end, Visit visit) const;

  ModelConfig config_;
  ParamRegistry registry_;
  std::vector<Block> blocks_;
  Norm final_norm_;
  Linear head_;
};

}  // namespace sbtrain
