// From logits to a token, and to the probabilities that are shown of it.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace sbtrain {

struct SamplingOptions {
  int64_t max_tokens = 128;
  double temperature = 0.8;  // 0: always the most likely token
  int64_t top_k = 0;         // only the k most likely tokens; 0: all
  double top_p = 0.95;       // only the most likely tokens that together reach this probability
  double min_p = 0;          // only tokens of at least this part of the likeliest one's probability
  uint64_t seed = 1;
  int64_t vocab = 0;  // only tokens below, where a model has more than its tokenizer; 0: all
};

// What the tokens of a sequence so far change in the logits of the next one. Tokens beyond the
// logits are passed over.
struct LogitChanges {
  // Logits of `seen` tokens, each of which is listed once, are divided by it where they are above 0
  // and multiplied where they are not (arXiv 1909.05858, equation 13, as vLLM and transformers do).
  double repetition_penalty = 1;
  std::span<const int32_t> seen{};
  std::span<const int32_t> banned{};  // are never drawn
  bool any() const { return repetition_penalty != 1 || !banned.empty(); }
};
void change_logits(const LogitChanges& changes, std::span<float> logits);

// Draws one token from logits (nats, [V]). top_p is a part of what top_k and min_p have left. The
// random number depends on the seed and `position` only, so the same seed and prompt give the same
// text. Of tokens that are equally likely, the one with the smaller id counts as the more likely
// one.
int32_t sample_token(std::span<const float> logits, const SamplingOptions& options,
                     uint64_t position);

// The natural logarithm of a token's probability, and of those of the likeliest tokens in its
// place, the likeliest first: at temperature 1, over all V logits.
struct TokenLogprob {
  int32_t token = -1;
  float logprob = 0;
  std::vector<std::pair<int32_t, float>> top;
};

// `top` of all tokens are listed, those that no tokenizer knows among them: they have a part of the
// probability. Throws ExitCode::kDiverged for logits that are not finite: such a model has no
// probabilities.
TokenLogprob token_logprob(std::span<const float> logits, int32_t token, int64_t top);

}  // namespace sbtrain
