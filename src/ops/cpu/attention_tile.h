// What both attention ops share: how a micro-batch is cut into tiles of 64 queries and chunks of
// 128 keys, and how rows of one head are brought into contiguous memory.
//
// Scores of a chunk lie transposed, [keys, kTile]: queries are the SIMD lanes, so scans over keys
// are plain loops over rows.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <vector>

#include "core/sequences.h"
#include "core/stream.h"
#include "core/tensor.h"
#include "ops/cpu/blas.h"
#include "ops/ops.h"

namespace sbtrain::ops::cpu {

inline constexpr int64_t kTile = kStickBreakingTile;  // queries, padded with zeros
inline constexpr int64_t kChunk = 128;                // keys

struct Document {
  int64_t begin;   // first token in the pack
  int64_t length;  // > 0
};

// `first` and `count` (at most kTile) queries of one document, relative to it.
struct QueryTile {
  Document document;
  int64_t first;
  int64_t count;
};

// The documents that have tokens, longest first, so that threads finish together. Together they
// must be the `tokens` tokens of the pack.
std::vector<Document> documents_by_length(const Sequences& sequences, int64_t tokens);
// Their query tiles, those that see most keys first.
std::vector<QueryTile> query_tiles_by_keys(const Sequences& sequences, int64_t tokens);

// The columns of head `h` in a [T, H*d] tensor, from token `token` on.
struct HeadRows {
  float* data;
  int64_t stride;
};
inline HeadRows head_rows(const Tensor& x, int64_t head, int64_t head_dim, int64_t token) {
  return {x.f32() + token * x.row_stride + head * head_dim, x.row_stride};
}

// dst [count, d] = scale * rows [0, count); rows up to `padded` become zero.
void pack(float* dst, HeadRows src, int64_t count, int64_t padded, int64_t head_dim, float scale);
// dst [d, kTile] = transpose of `rows` [kTile, d].
void transpose(float* dst, const float* rows, int64_t head_dim);

// y [keys, kTile] = rows [keys, d] x [d, kTile].
inline void score(float* y, const float* rows, const float* x, int64_t keys, int64_t head_dim) {
  gemm_serial(Transpose::kNo, Transpose::kNo, keys, kTile, head_dim, 1.0f, rows, head_dim, x, kTile,
              0.0f, y, kTile);
}
// y [kTile, d] += p [keys, kTile]^T rows [keys, d].
inline void mix(float* y, const float* p, const float* rows, int64_t keys, int64_t head_dim) {
  gemm_serial(Transpose::kYes, Transpose::kNo, kTile, head_dim, keys, 1.0f, p, kTile, rows,
              head_dim, 1.0f, y, head_dim);
}
// y [keys, d] += p [keys, kTile] x [kTile, d].
inline void scatter(HeadRows y, const float* p, const float* x, int64_t keys, int64_t head_dim) {
  gemm_serial(Transpose::kNo, Transpose::kNo, keys, head_dim, kTile, 1.0f, p, kTile, x, head_dim,
              1.0f, y.data, y.stride);
}

// Zeroes `width` columns of head `head` for all tokens of `document`; x is [T, H*width].
void zero_head(const Tensor& x, int64_t head, int64_t width, const Document& document);

// The cached keys and values of one sequence and head, and the query that meets them.
struct CachedHead {
  CachedHead(const DecodeTensors& t, int64_t sequence, int64_t head, int64_t head_dim);
  // z[i] = scale * q.k of key begin + i.
  void logits(float* z, int64_t begin, int64_t keys, float scale) const;
  void add_value(float* o, int64_t key, float weight) const;
  const float *q, *k, *v;
  int64_t stride;  // between tokens of the cache
  int64_t length;  // the new token included
  int64_t head_dim;
};

// `floats` for each thread.
inline Buffer thread_scratch(const Stream& s, std::string_view name, int64_t floats) {
  return s.scratch(name, DType::kF32, {omp_get_max_threads(), floats});
}

// Hands out consecutive parts of one thread's scratch.
class Scratch {
 public:
  explicit Scratch(const Tensor& scratch)
      : next_(scratch.f32() + omp_get_thread_num() * scratch.row_stride) {}
  float* take(int64_t floats) {
    float* part = next_;
    next_ += floats;
    return part;
  }

 private:
  float* next_;
};

}  // namespace sbtrain::ops::cpu
