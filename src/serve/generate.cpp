#include "serve/generate.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/error.h"
#include "core/philox.h"
#include "ops/memory.h"

namespace sbtrain {
namespace {

struct Candidate {
  int32_t token;
  double probability;
};

// Softmax at the given temperature over the k most likely tokens, most likely first.
std::vector<Candidate> candidates(std::span<const float> logits, double temperature,
                                  int64_t top_k) {
  std::vector<Candidate> all(logits.size());
  for (size_t i = 0; i < logits.size(); ++i) all[i] = {static_cast<int32_t>(i), logits[i]};
  const size_t keep =
      top_k > 0 ? std::min<size_t>(static_cast<size_t>(top_k), all.size()) : all.size();
  std::partial_sort(all.begin(), all.begin() + static_cast<int64_t>(keep), all.end(),
                    [](const Candidate& a, const Candidate& b) {
                      return a.probability != b.probability ? a.probability > b.probability
                                                            : a.token < b.token;
                    });
  all.resize(keep);
  const double top = all[0].probability;
  double sum = 0;
  for (Candidate& c : all) sum += c.probability = std::exp((c.probability - top) / temperature);
  for (Candidate& c : all) c.probability /= sum;
  return all;
}

}  // namespace

int32_t sample_token(std::span<const float> logits, const SamplingOptions& options,
                     uint64_t position) {
  require(!logits.empty(), "sampling from no logits");
  if (options.temperature <= 0) {
    return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  }
  std::vector<Candidate> kept = candidates(logits, options.temperature, options.top_k);
  double mass = 0;
  size_t count = 0;
  while (count < kept.size() && (count == 0 || mass < options.top_p)) {
    mass += kept[count++].probability;
  }
  kept.resize(count);
  double u = Philox(options.seed, RandomPurpose::kSampling, "token").uniform(position) * mass;
  for (const Candidate& c : kept) {
    u -= c.probability;
    if (u < 0) return c.token;
  }
  return kept.back().token;
}

std::vector<int32_t> generate(const Transformer& model, ParamAccess& params, Stream& s,
                              std::span<const int32_t> prompt, const SamplingOptions& options,
                              int32_t stop_token, const std::function<bool(int32_t)>& on_token) {
  require(!prompt.empty(), "generation needs at least one token to start from");
  const int64_t length = static_cast<int64_t>(prompt.size());
  const auto ints = [&](int64_t n) {
    return s.memory().allocate(MemoryClass::kInputs, "generate", DType::kI32, {n});
  };
  const auto upload = [&](const Tensor& t, std::vector<int32_t> values) {
    ops::run(s, ops::CopyFromHost{.y = t, .host = values.data()});
    ops::run(s, ops::Synchronize{});
  };
  Buffer tokens_T = ints(length);
  Buffer positions_T = ints(length);
  Buffer boundaries = ints(2);
  Buffer token_B = ints(1);
  Buffer position_B = ints(1);
  Buffer length_B = ints(1);
  Buffer logits_1V =
      s.memory().allocate(MemoryClass::kLogits, "logits", DType::kF32, {1, model.config().vocab});
  std::vector<int32_t> positions(prompt.size());
  std::iota(positions.begin(), positions.end(), 0);
  upload(tokens_T, {prompt.begin(), prompt.end()});
  upload(positions_T, positions);
  upload(boundaries, {0, static_cast<int32_t>(length)});

  const int64_t capacity = length + options.max_tokens;
  DecodeCache cache = model.allocate_cache(s.memory(), 1, capacity);
  const BatchTensors batch = {.tokens_T = tokens_T,
                              .targets_T = {},
                              .sequences = {.cu_seqlens = boundaries,
                                            .positions_T = positions_T,
                                            .count = 1,
                                            .max_seqlen = capacity}};
  model.prefill(s, params, batch, cache, 0, logits_1V);

  std::vector<int32_t> out;
  std::vector<float> logits(static_cast<size_t>(model.config().vocab));
  const size_t drawn_from =
      options.vocab > 0 ? std::min<size_t>(static_cast<size_t>(options.vocab), logits.size())
                        : logits.size();
  for (int64_t n = 0; n < options.max_tokens; ++n) {
    ops::run(s, ops::CopyToHost{.host = logits.data(), .x = logits_1V});
    const int32_t token =
        sample_token(std::span(logits).first(drawn_from), options, static_cast<uint64_t>(n));
    if (token == stop_token) break;
    out.push_back(token);
    if (on_token && !on_token(token)) break;
    if (n + 1 == options.max_tokens) break;
    upload(token_B, {token});
    upload(position_B, {static_cast<int32_t>(length + n)});
    upload(length_B, {static_cast<int32_t>(length + n + 1)});
    model.decode(s, params, token_B, cache, {.positions_B = position_B, .lengths_B = length_B},
                 logits_1V);
  }
  return out;
}

}  // namespace sbtrain
