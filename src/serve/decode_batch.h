// Sequences that a model continues together. Each has a slot of one cache; sequences come and go
// between steps, and each step takes one token of every sequence.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "core/stream.h"
#include "model/transformer.h"

namespace sbtrain {

// On the CPU, the logits of a sequence do not depend on the other sequences, nor on its slot: they
// have the same bits as if it ran alone, for up to ops::cpu::kFewRows slots. On a GPU, products of
// another number of rows may be summed in another order.
class DecodeBatch {
 public:
  // Allocates the cache: `slots` sequences of at most `capacity` tokens each.
  DecodeBatch(const Transformer& model, ParamAccess& params, Stream& s, int64_t slots,
              int64_t capacity);

  int64_t slots() const { return static_cast<int64_t>(lengths_.size()); }
  int64_t capacity() const { return capacity_; }
  int64_t free_slots() const;
  // Tokens of the sequence in the slot.
  int64_t length(int64_t slot) const { return lengths_.at(static_cast<size_t>(slot)); }

  // The logits (nats, [N, V]) of the prompt's tokens [first, first + N).
  using PromptLogits = std::function<void(int64_t first, int64_t rows, std::span<const float>)>;
  // Begins a sequence with 1 to `capacity` tokens in a free slot, which it returns. logits(slot)
  // are then those of the next token. `visit`, if set, sees the logits of all prompt tokens in
  // order.
  int64_t start(std::span<const int32_t> prompt, const PromptLogits& visit = nullptr);
  // Ends the sequence in the slot.
  void stop(int64_t slot);
  // Appends tokens[slot] to the sequence of each slot that has one; other elements are ignored. No
  // sequence may have `capacity` tokens already.
  void step(std::span<const int32_t> tokens);
  // The logits of the token that follows the sequence in the slot: [V].
  std::span<const float> logits(int64_t slot) const;

 private:
  Tensor upload(const Buffer& buffer, const std::vector<int32_t>& values) const;
  bool used(int64_t slot) const { return length(slot) > 0; }

  const Transformer& model_;
  ParamAccess& params_;
  Stream& s_;
  int64_t capacity_;
  int64_t vocab_;
  std::vector<int64_t> lengths_;  // tokens by slot; 0: free
  DecodeCache cache_;
  Buffer tokens_T_, positions_T_, boundaries_;  // of a prompt
  Buffer tokens_B_, positions_B_, lengths_B_;   // of a step
  Buffer logits_CV_;                            // of a step, or of a part of a prompt
  std::vector<float> logits_;                   // [slots, V]
  std::vector<float> prompt_logits_;            // [C, V], once prompts are visited
};

}  // namespace sbtrain
