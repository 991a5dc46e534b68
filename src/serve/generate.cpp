#include "serve/generate.h"

#include <array>

#include "core/error.h"
namespace sbtrain {

std::vector<int32_t> generate(const Transformer& model, ParamAccess& params, Stream& s,
                              std::span<const int32_t> prompt, const SamplingOptions& options,
                              int32_t stop_token, const std::function<bool(int32_t)>& on_token,
                              const KeyDropping& dropping, CacheUse* use) {
  require(!prompt.empty(), "generation needs at least one token to start from");
  DecodeBatch batch(model, params, s, /*slots=*/1,
                    static_cast<int64_t>(prompt.size()) + options.max_tokens,
                    {.vocab = options.vocab, .dropping = dropping});
  const int64_t slot = batch.start(prompt);
  std::vector<int32_t> out;
  for (int64_t n = 0; n < options.max_tokens; ++n) {
    const int32_t token = batch.draw(slot, options, static_cast<uint64_t>(n));
    if (token == stop_token) break;
    out.push_back(token);
    if (on_token && !on_token(token)) break;
    if (n + 1 == options.max_tokens) break;
    batch.step(std::array{token});
  }
  if (use != nullptr) *use = batch.cache_use(/*now=*/true);
  return out;
}

std::vector<std::vector<int32_t>> generate_all(DecodeBatch& batch,
                                               std::span<const std::vector<int32_t>> prompts,
                                               const SamplingOptions& options, int32_t stop_token,
                                               const std::function<void(size_t)>& before_prompt) {
  std::vector<std::vector<int32_t>> out(prompts.size());
  if (options.max_tokens == 0) return out;
  struct Running {
    size_t prompt;
    int64_t slot;
  };
  std::vector<Running> running;
  std::vector<int32_t> next(static_cast<size_t>(batch.slots()));
  size_t waiting = 0;  // the first prompt that has not run
  do {
    for (; waiting < prompts.size() && batch.free_slots() > 0; ++waiting) {
      if (before_prompt) before_prompt(waiting);
      running.push_back({waiting, batch.start(prompts[waiting])});
    }
    if (batch.draws_from_logits(options)) batch.fetch_logits();
    for (size_t i = 0; i < running.size();) {
      const auto [prompt, slot] = running[i];
      const int32_t token = batch.draw(slot, options, out[prompt].size());
      const bool stops = token == stop_token;
      if (!stops) out[prompt].push_back(token);
      if (stops || static_cast<int64_t>(out[prompt].size()) == options.max_tokens) {
        batch.stop(slot);
        running.erase(running.begin() + static_cast<ptrdiff_t>(i));
      } else {
        next[static_cast<size_t>(slot)] = token;
        ++i;
      }
    }
    batch.step(next);
  } while (waiting < prompts.size() || !running.empty());
  return out;
}

}  // namespace sbtrain
