// Scratch of the ops, in one place so that planning and running take the same.
#pragma once

#include <algorithm>

#include "core/stream.h"

namespace sbtrain::ops {

// Sums over tokens are formed in this many parts, always the same ones, and the parts are added in
// order: the result does not depend on the number of threads.
inline constexpr int64_t kTokenParts = 32;

// One row of partial sums for each part.
inline Buffer token_partials(const Stream& s, int64_t cols) {
  return s.scratch("partial sums over tokens", DType::kF32, {kTokenParts, cols});
}

// Tokens whose logits exist at once: about 8 MiB of them, so that they stay in the caches between
// the three matrix products that share them, but enough for those products to run at full speed.
inline int64_t logits_chunk_tokens(int64_t tokens, int64_t vocab) {
  constexpr int64_t kElements = int64_t{1} << 21;
  return std::min(tokens, std::max<int64_t>(64, kElements / vocab / 64 * 64));
}

inline Buffer logits_chunk(const Stream& s, int64_t tokens, int64_t vocab) {
  return s.memory().allocate(MemoryClass::kLogits, "logits", DType::kF32,
                             {logits_chunk_tokens(tokens, vocab), vocab});
}

}  // namespace sbtrain::ops
