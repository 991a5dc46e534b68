// Text generation with a key-value cache.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "core/stream.h"
#include "model/transformer.h"
#include "serve/sampling.h"

namespace sbtrain {

// Continues `prompt` (at least one token) until max_tokens, `stop_token` (negative: none) or
// `on_token` returns false. Returns the new tokens without the stop token.
std::vector<int32_t> generate(const Transformer& model, ParamAccess& params, Stream& s,
                              std::span<const int32_t> prompt, const SamplingOptions& options,
                              int32_t stop_token,
                              const std::function<bool(int32_t)>& on_token = nullptr);

}  // namespace sbtrain
