// Keys that are kept while others are dropped: where they lie, and how they come there.
//
// Each head of keys of each sequence has rows of its own, one for each key that it keeps, in the
// order of the tokens. The rows lie in pages (arXiv 2309.06180), so that a head takes memory for
// what it keeps. A page has kPageKeys rows of one head:
//   keys [kPageKeys, head_dim], values [kPageKeys, head_dim], both of one type,
//   gates [kPageKeys, group], f32, of the `group` heads of queries that share the head of keys.
// A key is dropped if all of its gates are below a bound.
#pragma once

#include "kernels/types.h"

namespace sbtrain::kernels {

inline constexpr int kPageKeys = 64;

// `element`: bytes of a channel.
constexpr int64_t page_gates_at(int64_t head_dim, int64_t element) {
  return 2 * kPageKeys * head_dim * element;
}
constexpr int64_t page_bytes(int64_t head_dim, int64_t element, int64_t group) {
  return page_gates_at(head_dim, element) + kPageKeys * group * int64_t{sizeof(float)};
}

// The addresses of pages, [batch, key_heads, most], each a multiple of 256. Where rows are written
// or read, the pages are there; other elements are never used.
struct KeyPages {
  const int64_t* data = nullptr;
  int64_t stride = 0;  // elements from sequence to sequence
  int64_t most = 0;    // of a head
  constexpr const int64_t* of_head(int64_t sequence, int64_t key_head) const {
    return data + sequence * stride + key_head * most;
  }
};

// rows [key_heads, tokens]: in which row the key of a token is kept, or -1; counts [key_heads]: how
// many are kept. gate [tokens, heads].
struct KeepKeys {
  int32_t* rows;
  int32_t* counts;
  Matrix<const float> gate;
  float bound;
  int64_t tokens;
  int heads, key_heads;
};
void launch(cudaStream_t stream, const KeepKeys& p);

// Copies what KeepKeys keeps of a sequence to its pages [1, key_heads, most]. k, v bf16 [tokens,
// key_heads * head_dim].
struct StoreKeys {
  KeyPages pages;
  const int32_t* rows;
  Matrix<const bf16> k, v;
  Matrix<const float> gate;
  int64_t tokens;
  int heads, key_heads, head_dim;
};
void launch(cudaStream_t stream, const StoreKeys& p);

// Makes room for the key of one new token of each sequence: puts its gates into the row after those
// that are kept; lengths [batch, key_heads] become the rows with this one; counts [batch,
// key_heads] grow by those that are kept, whose rows the next key does not take. A sequence begins
// with position 0. gate [batch, heads]; a row beyond the pages stops the kernel.
struct PlaceKeys {
  KeyPages pages;
  Matrix<int32_t> counts;
  int32_t* lengths;
  Matrix<const float> gate;
  const int32_t* positions;
  float bound;
  int64_t batch;
  int heads, key_heads, head_dim;
};
void launch(cudaStream_t stream, const PlaceKeys& p);

}  // namespace sbtrain::kernels
