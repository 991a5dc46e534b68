// The layout of the states of rebased_state.cu, and which tokens take part in them: plain
// arithmetic, tested on the host.
//
// A state of a head with f features is [rows, e + 1] f32, sums of row times [v | 1]. Its rows are,
// where the polynomial has lower terms, the constant 1 and the f features, then the products of two
// features a <= b in the order (0,0), (0,1), ..., (1,1), ...
//
// Chunks are aligned to the pack, not to its documents: chunk c is the tokens [c, c + 1) *
// kRebasedChunk. So the number of chunks depends only on the number of tokens. The state that
// enters a chunk is that of the document which lies across its beginning, and is seen by the tokens
// of that document; the state that leaves it is that of the document of its last token.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sbtrain::kernels {

inline constexpr int kRebasedChunk = 128;
// The largest heads that the kernels take.
inline constexpr int kMaxRebasedFeatures = 32;
inline constexpr int kMaxRebasedValues = 128;

constexpr int64_t rebased_chunks(int64_t tokens) {
  return (tokens + kRebasedChunk - 1) / kRebasedChunk;
}

constexpr int rebased_rows(int f, bool lower) {
  return f * (f + 1) / 2 + (lower ? 1 + f : 0);
}
// The row of the product of features a and b, in any order.
constexpr int rebased_row(int f, bool lower, int a, int b) {
  const int low = a < b ? a : b;
  const int high = a < b ? b : a;
  return (lower ? 1 + f : 0) + low * f - low * (low - 1) / 2 + high - low;
}
// The two features whose product a row is; feature f is the constant 1.
struct RebasedFactors {
  int a, b;
};
constexpr RebasedFactors rebased_factors(int f, bool lower, int row) {
  if (lower) {
    if (row == 0) return {f, f};
    if (row <= f) return {row - 1, f};
    row -= 1 + f;
  }
  int a = 0;
  while (row >= f - a) row -= f - a++;
  return {a, a + row};
}

// Whether the token's document began before the token's chunk, so that the token sees the state
// that enters the chunk. For the chunk's last token: whether that state is part of the one that
// leaves.
constexpr bool sees_rebased_state(int token, int position) {
  return position > token % kRebasedChunk;
}
// The first token of the chunk that is part of the state which leaves it.
constexpr int first_in_rebased_state(int last_token, int position_of_last) {
  const int begin = last_token / kRebasedChunk * kRebasedChunk;
  const int document = last_token - position_of_last;
  return document > begin ? document : begin;
}
// The first key whose weight for the query is computed on its own, not through a state.
constexpr int first_rebased_key(int query, int position, bool chunked) {
  const int document = query - position;
  const int chunk = query / kRebasedChunk * kRebasedChunk;
  return chunked && chunk > document ? chunk : document;
}

}  // namespace sbtrain::kernels
