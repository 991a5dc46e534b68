// Text generation with a key-value cache.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "core/stream.h"
#include "model/transformer.h"

namespace sbtrain {

struct SamplingOptions {
  int64_t max_tokens = 128;
  double temperature = 0.8;  // 0: always the most likely token
  int64_t top_k = 0;         // only the k most likely tokens; 0: all
  double top_p = 0.95;       // only the most likely tokens that together reach this probability
  uint64_t seed = 1;
  int64_t vocab = 0;  // only tokens below, where a model has more than its tokenizer; 0: all
};

// Draws one token from logits (nats, [V]). The random number depends on the seed and `position`
// only, so the same seed and prompt give the same text.
int32_t sample_token(std::span<const float> logits, const SamplingOptions& options,
                     uint64_t position);

// Continues `prompt` (at least one token) until max_tokens, `stop_token` (negative: none) or
// `on_token` returns false. Returns the new tokens without the stop token.
std::vector<int32_t> generate(const Transformer& model, ParamAccess& params, Stream& s,
                              std::span<const int32_t> prompt, const SamplingOptions& options,
                              int32_t stop_token,
                              const std::function<bool(int32_t)>& on_token = nullptr);

}  // namespace sbtrain
