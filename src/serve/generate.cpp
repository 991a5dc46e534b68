#include "serve/generate.h"

#include <array>

#include "core/error.h"
#include "serve/decode_batch.h"

namespace sbtrain {

std::vector<int32_t> generate(const Transformer& model, ParamAccess& params, Stream& s,
                              std::span<const int32_t> prompt, const SamplingOptions& options,
                              int32_t stop_token, const std::function<bool(int32_t)>& on_token) {
  require(!prompt.empty(), "generation needs at least one token to start from");
  DecodeBatch batch(model, params, s, /*slots=*/1,
                    static_cast<int64_t>(prompt.size()) + options.max_tokens,
                    {.vocab = options.vocab});
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
  return out;
}

}  // namespace sbtrain
