// Sequences that a model continues together. Each has a slot of one cache; sequences come and go
// between steps, and each step takes one token of every sequence.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "core/graph.h"
#include "core/stream.h"
#include "model/inference/decode_cache.h"
#include "model/inference/prefill.h"
#include "model/transformer.h"
#include "serve/sampling.h"

namespace sbtrain {

struct DecodeOptions {
  int64_t vocab = 0;  // likeliest() knows the tokens below, where a model has more; 0: all
  // On a GPU. Neither changes a result; they are for measuring what they gain.
  bool recorded = true;  // steps of the same number of rows run by one record (core/graph.h)
  bool overlap = true;   // StreamControl::set_overlap
  KeyDropping dropping{};
};

constexpr int64_t kMostSlots = 64;  // with the same bits (ops/cpu/blas.h, kernels/skinny_gemm.h)

// The logits of a sequence do not depend on the other sequences, nor on its slot: they have the
// same bits as if it ran alone, for up to kMostSlots slots.
class DecodeBatch {
 public:
  // Allocates the cache: `slots` sequences of at most `capacity` tokens each.
  DecodeBatch(const Transformer& model, ParamAccess& params, Stream& s, int64_t slots,
              int64_t capacity, const DecodeOptions& options = {});

  int64_t slots() const { return static_cast<int64_t>(lengths_.size()); }
  int64_t capacity() const { return capacity_; }
  int64_t free_slots() const;
  // Tokens of the sequence in the slot.
  int64_t length(int64_t slot) const { return lengths_.at(static_cast<size_t>(slot)); }

  // The logits (nats, [N, V]) of the prompt's tokens [first, first + N).
  using PromptLogits = std::function<void(int64_t first, int64_t rows, std::span<const float>)>;
  // Begins a sequence with 1 to `capacity` tokens in a free slot, which it returns. logits(slot)
  // are then those of the next token. `visit`, if set, sees the logits of all prompt tokens in
  // order. `reach` is the most tokens that the sequence may come to have, for which dynamic_ntk
  // scales its positions; 0: the capacity.
  int64_t start(std::span<const int32_t> prompt, const PromptLogits& visit = nullptr,
                int64_t reach = 0);
  // The same in parts: begin() takes the slot, and advance() runs the prompt until it returns true;
  // only then does the slot have a sequence. Other sequences may step between the calls. There is
  // one such prompt at a time. The logits have the same bits as those of start().
  int64_t begin(std::span<const int32_t> prompt, const PromptLogits& visit = nullptr,
                int64_t reach = 0);
  // Runs as many layers as make up for `tokens` tokens in all layers, but at least one layer, or
  // with `visit` the logits of as many tokens, and waits for it. Takes what it has run from
  // `tokens`, which may become negative.
  bool advance(int64_t& tokens);
  // Ends the sequence in the slot, or the prompt that has begun there.
  void stop(int64_t slot);
  // Appends tokens[slot] to the sequence of each slot that has one; other elements are ignored. No
  // sequence may have as many tokens already as it may come to have. Throws CacheFull where
  // make_room() would return a slot.
  void step(std::span<const int32_t> tokens);
  // Where keys are dropped (KeyDropping): makes room for the next step, and returns the slots for
  // which the cache has none. Their sequences must stop. start() and advance() throw CacheFull if
  // there is no room for a prompt; its slot is free then.
  std::vector<int64_t> make_room();
  // What the sequences keep in the cache; if `now`, the counts are read first. Nothing where no
  // keys are dropped.
  CacheUse cache_use(bool now = false);
  // The likeliest token to follow the sequence in the slot, the smallest of equals. Throws
  // ExitCode::kDiverged if the logits are not finite.
  int32_t likeliest(int64_t slot) const;
  // Draws the token that follows the sequence in the slot, as sample_token() does from its logits
  // after the changes.
  int32_t draw(int64_t slot, const SamplingOptions& sampling, uint64_t position,
               const LogitChanges& changes = {});
  // Whether draw() without changes needs the logits, or knows the likeliest token already.
  bool draws_from_logits(const SamplingOptions& sampling) const;
  // The logits of the token that follows the sequence in the slot: [V]. On a GPU they are copied
  // to the host by the first call after a step, or for all slots at once by fetch_logits(), after
  // which several threads may call logits().
  std::span<const float> logits(int64_t slot);
  void fetch_logits();

  // Times the ops of the steps from now on; null: no more. Such steps do not run by a record.
  void set_profile(OpProfile* profile);

 private:
  // Steps on a GPU have a memory of their own, planned for each number of rows: a record names
  // memory, which must not go to anybody else. The host waits at the end of each step and each
  // prompt, so this stream and the one of the prompts need no events.
  struct Recorded {
    explicit Recorded(Backend backend) : memory(backend), stream(memory), graph(stream) {}
    Memory memory;
    Stream stream;
    CapturedGraph graph;
  };
  // The prompt of begin().
  struct Prompt {
    int64_t slot = -1;  // -1: none has begun
    PromptLogits visit;
    PartialPrefill run;
  };
  BatchTensors upload_prompt(std::span<const int32_t> prompt, int64_t slot, int64_t reach);
  int64_t free_slot() const;
  std::vector<int64_t> used_slots() const;
  // Runs work(), and frees the slot if the cache is full.
  template <typename Work>
  void with_slot(int64_t slot, const Work& work);
  void see_logits(const PromptLogits& visit, int64_t first, const Tensor& logits_NV);
  void begin_sequence(int64_t slot, int64_t length);
  // Whether steps run, or are planned to run, by records.
  bool records_steps() const { return s_.memory().target().backend == Backend::kCuda; }
  void plan_steps();
  int64_t rows_of_step() const;
  int64_t with_idle_rows(int64_t rows) const;
  void decode(Stream& s, int64_t rows);
  // Part `part` of inputs_4B: tokens, positions, lengths or reaches.
  Tensor input(int64_t part, int64_t rows) const;
  void find_likeliest(Stream& s, int64_t first, int64_t rows) const;
  void read_likeliest(Stream& s, int64_t first, int64_t rows);
  bool used(int64_t slot) const { return length(slot) > 0; }
  Stream& step_stream() { return recorded_ ? recorded_->stream : s_; }

  const Transformer& model_;
  ParamAccess& params_;
  Stream& s_;
  DecodeOptions options_;
  int64_t capacity_;
  int64_t vocab_;
  std::vector<int64_t> lengths_;  // tokens by slot; 0: no sequence
  std::vector<int64_t> reaches_;  // the most tokens by slot
  DecodeCache cache_;
  Buffer tokens_T_, positions_T_, boundaries_;  // of a prompt
  Buffer prompt_logits_CV_;                     // of a part of a prompt
  Buffer inputs_4B_;                            // of a step
  Buffer logits_BV_;                            // of the token that follows each sequence
  Buffer likeliest_B_;
  std::unique_ptr<Recorded> recorded_;  // null except on a GPU
  Buffer planned_steps_;                // where a GPU is planned for: the memory of recorded_
  std::vector<int32_t> tops_;           // likeliest_B_ on the host
  std::vector<float> logits_;           // [slots, V]: logits_BV_ on the host, where fetched_
  std::vector<uint8_t> fetched_;        // by slot
  std::vector<float> prompt_logits_;    // [C, V], once prompts are visited
  Prompt prompt_;
};

}  // namespace sbtrain
