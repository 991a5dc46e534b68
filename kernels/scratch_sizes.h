// Sizes of the kernels' scratch, which the memory plan needs even on a machine without a GPU.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sbtrain::kernels {

// Sums over tokens are formed in this many parts, always the same ones, and then added in a fixed
// order. There are two for each of the 132 multiprocessors of an H100 or H200; other GPUs use the
// same number, and so give the same sums. The scratch of a kernel that forms such sums is f32
// [kTokenParts, n]; its header states n.
inline constexpr int64_t kTokenParts = 264;

// Partial sums of `sum` and `squared_norm`: f64 [kSumParts].
inline constexpr int64_t kSumParts = 1056;

// The embedding's gradient is summed in chunks of this many tokens, sorted by their id. A chunk has
// two rows of scratch: one for the id that it shares with earlier chunks, one for later chunks.
inline constexpr int64_t kEmbeddingChunk = 32;

// The layout of the scratch of embedding_backward, in bytes from its start.
struct EmbeddingScratch {
  size_t indices;         // i32 [tokens], 0, 1, 2, ...
  size_t sorted_tokens;   // i32 [tokens]
  size_t sorted_indices;  // i32 [tokens]
  size_t sums;            // f32 [2 * chunks, width]
  size_t sort;            // of CUB
  size_t sort_bytes;
  size_t bytes;
};

constexpr EmbeddingScratch embedding_scratch(int64_t tokens, int64_t width) {
  constexpr size_t kAlignment = 256;
  const auto count = static_cast<size_t>(tokens);
  const size_t chunks = (count + kEmbeddingChunk - 1) / kEmbeddingChunk;
  EmbeddingScratch s{};
  const auto take = [&](size_t bytes) {
    const size_t begin = s.bytes;
    s.bytes += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return begin;
  };
  s.indices = take(count * sizeof(int32_t));
  s.sorted_tokens = take(count * sizeof(int32_t));
  s.sorted_indices = take(count * sizeof(int32_t));
  s.sums = take(2 * chunks * static_cast<size_t>(width) * sizeof(float));
  // A radix sort of pairs needs a second copy of keys and values, 8 bytes for each token, and
  // histograms.
  s.sort_bytes = 12 * count + (size_t{1} << 20);
  s.sort = take(s.sort_bytes);
  return s;
}

constexpr size_t embedding_backward_scratch_bytes(int64_t tokens, int64_t width) {
  return embedding_scratch(tokens, width).bytes;
}

}  // namespace sbtrain::kernels
