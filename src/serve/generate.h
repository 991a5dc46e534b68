// Text generation with a key-value cache.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "core/stream.h"
#include "model/transformer.h"
#include "serve/decode_batch.h"
#include "serve/sampling.h"

namespace sbtrain {

// Continues `prompt` (at least one token) until max_tokens, `stop_token` (negative: none) or
// `on_token` returns false. Returns the new tokens without the stop token. Where keys are dropped,
// `use`, if set, becomes what the sequence has in the cache in the end; throws CacheFull.
std::vector<int32_t> generate(const Transformer& model, ParamAccess& params, Stream& s,
                              std::span<const int32_t> prompt, const SamplingOptions& options,
                              int32_t stop_token,
                              const std::function<bool(int32_t)>& on_token = nullptr,
                              const KeyDropping& dropping = {}, CacheUse* use = nullptr);

// What generate() returns for each of `prompts`, with the same bits, except that dynamic_ntk scales
// all of them by the batch's capacity: as many of them together as `batch` has free slots; the
// others take the slots of those that end. A prompt and max_tokens must fit the batch's capacity.
// before_prompt(i), if set, is called before prompt i runs.
std::vector<std::vector<int32_t>> generate_all(
    DecodeBatch& batch, std::span<const std::vector<int32_t>> prompts,
    const SamplingOptions& options, int32_t stop_token,
    const std::function<void(size_t)>& before_prompt = nullptr);

}  // namespace sbtrain
