// Scratch of the ops, in one place so that planning and running take the same. Sizes depend on the
// stream's target and on shapes alone: a plan needs no device.
#pragma once

#include <algorithm>

#include "core/stream.h"
#include "kernels/scratch_sizes.h"

namespace sbtrain::ops {

inline bool on_cuda(const Stream& s) {
  return s.target() == Backend::kCuda;
}

// Sums over tokens are formed in this many parts, always the same ones, and the parts are added in
// order: the result does not depend on the number of threads or blocks.
inline int64_t token_parts(const Stream& s) {
  return on_cuda(s) ? kernels::kTokenParts : 32;
}

// One row of partial sums for each part.
inline Buffer token_partials(const Stream& s, int64_t cols) {
  return s.scratch("partial sums over tokens", DType::kF32, {token_parts(s), cols});
}

// Of a full reduction on the GPU.
inline Buffer reduction_partials(const Stream& s) {
  if (!on_cuda(s)) return {};
  return s.scratch("partial sums", DType::kF64, {kernels::kSumParts});
}

// Tokens sorted by their id, and sums of those of one id.
inline Buffer embedding_scratch(const Stream& s, int64_t tokens, int64_t width) {
  if (!on_cuda(s)) return {};
  const size_t bytes = kernels::embedding_backward_scratch_bytes(tokens, width);
  return s.scratch("embedding backward", DType::kI32, {static_cast<int64_t>(bytes / 4)});
}

// What cuBLASLt may use in one product.
inline Buffer linear_workspace(const Stream& s) {
  if (!on_cuda(s)) return {};
  return s.scratch("cuBLASLt", DType::kI32, {int64_t{32} << 18});
}

// Tokens whose logits exist at once. CPU: about 8 MiB of them, so that they stay in the caches
// between the three matrix products that share them, but enough for those to run at full speed.
// GPU: about 1 GiB, so that each product fills it, in chunks of equal size.
inline int64_t logits_chunk_tokens(const Stream& s, int64_t tokens, int64_t vocab) {
  if (!on_cuda(s)) {
    constexpr int64_t kElements = int64_t{1} << 21;
    return std::min(tokens, std::max<int64_t>(64, kElements / vocab / 64 * 64));
  }
  constexpr int64_t kElements = int64_t{1} << 28;
  const int64_t chunks = std::max<int64_t>(1, (tokens * vocab + kElements - 1) / kElements);
  return std::min(tokens, ((tokens + chunks - 1) / chunks + 127) / 128 * 128);
}

struct LogitsChunk {
  Buffer logits;   // f32
  Buffer dlogits;  // bf16, on the GPU when there is a backward pass; the CPU works in place
};
inline LogitsChunk logits_chunk(const Stream& s, int64_t tokens, int64_t vocab, bool backward) {
  const int64_t rows = logits_chunk_tokens(s, tokens, vocab);
  const auto allocate = [&](const char* name, DType dtype) {
    return s.memory().allocate(MemoryClass::kLogits, name, dtype, {rows, vocab});
  };
  LogitsChunk chunk;
  chunk.logits = allocate("logits", DType::kF32);
  if (backward && on_cuda(s)) chunk.dlogits = allocate("dlogits", DType::kBF16);
  return chunk;
}

}  // namespace sbtrain::ops
