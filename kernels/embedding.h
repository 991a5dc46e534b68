// The embedding table: lookup and its gradient (ops/embedding.h has the formulas). y, w and dy are
// bf16, dw f32; ids i32 in [0, vocab): other values stop the kernel. Source: embedding.cu.
#pragma once

#include "kernels/scratch_sizes.h"
#include "kernels/types.h"

namespace sbtrain::kernels {

struct Embedding {
  Matrix<bf16> y;  // [tokens, width]
  const int32_t* ids;
  Matrix<const bf16> w;  // [vocab, width]
  int64_t tokens, width, vocab;
  float scale;
};
// The tokens of one id are added in the order of t, in a grouping that depends only on the ids.
struct EmbeddingBackward {
  Matrix<float> dw;
  Matrix<const bf16> dy;
  const int32_t* ids;
  int64_t tokens, width, vocab;
  float scale;
  int32_t* scratch = nullptr;  // embedding_scratch(tokens, width).bytes, aligned to 256 bytes
};
void launch(cudaStream_t stream, const Embedding& p);
void launch(cudaStream_t stream, const EmbeddingBackward& p);

// The gradient is summed in chunks of this many tokens, sorted by their id. A chunk has two rows of
// scratch: one for the id that it shares with earlier chunks, one for later chunks.
inline constexpr int64_t kEmbeddingChunk = 32;

// The layout of the scratch of EmbeddingBackward, in bytes from its start.
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
  const auto count = static_cast<size_t>(tokens);
  const size_t chunks = (count + kEmbeddingChunk - 1) / kEmbeddingChunk;
  EmbeddingScratch s{};
  const auto take = [&](size_t bytes) {
    const size_t begin = s.bytes;
    s.bytes += align_scratch(bytes);
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

}  // namespace sbtrain::kernels
