// What the attention ops share: how a micro-batch is cut into tiles of 64 queries and chunks of
// 128 keys, how heads are spread over threads, and how rows of one head are brought into contiguous
// memory.
//
// Scores of a chunk lie transposed, [keys, kTile]: queries are the SIMD lanes, so scans over keys
// are plain loops over rows.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "core/sequences.h"
#include "core/stream.h"
#include "core/tensor.h"
#include "ops/attention.h"
#include "ops/cpu/blas.h"

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

// The documents that have tokens, longest first, so that threads finish together. Their lengths
// must add up to `tokens`.
std::vector<Document> documents_by_length(const Sequences& sequences, int64_t tokens);
// The query tiles of these documents; those that see the most keys come first.
std::vector<QueryTile> query_tiles_by_keys(const Sequences& sequences, int64_t tokens);

// For inner loops, without the checks of a Tensor.
using Matrix = kernels::Matrix<float>;

// dst [count, d] = scale * rows [0, count); rows up to `padded` become zero.
void pack(float* dst, Matrix src, int64_t count, int64_t padded, int64_t head_dim, float scale);
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
inline void scatter(Matrix y, const float* p, const float* x, int64_t keys, int64_t head_dim) {
  gemm_serial(Transpose::kNo, Transpose::kNo, keys, head_dim, kTile, 1.0f, p, kTile, x, head_dim,
              1.0f, y.data, y.stride);
}

// x [rows, cols] = 0.
void zero(Matrix x, int64_t rows, int64_t cols);

template <typename Op>
int64_t head_dim(const Op& op) {
  return op.q_THd.cols() / op.params.heads;
}

// The part of one head of queries in what both ops read and write, and that of the head of keys and
// values that it reads: matrices [T, d] from its first column on.
struct HeadMatrices {
  template <typename Op>
  HeadMatrices(const Op& t, int64_t index)
      : HeadMatrices(t, index, index / queries_of_key(t.q_THd, t.k_THd)) {}

  int64_t d;
  Matrix q, k, v, o;
  Matrix dout, dq, dk, dv;  // backward

 private:
  template <typename Op>
  HeadMatrices(const Op& t, int64_t index, int64_t key_index)
      : d(head_dim(t)),
        q(columns(t.q_THd, index)),
        k(columns(t.k_THd, key_index)),
        v(columns(t.v_THd, key_index)) {
    if constexpr (requires { t.o_THd; }) o = columns(t.o_THd, index);
    if constexpr (requires { t.do_THd; }) {
      dout = columns(t.do_THd, index);
      dq = columns(t.dq_THd, index);
      dk = columns(t.dk_THd, key_index);
      dv = columns(t.dv_THd, key_index);
    }
  }
  Matrix columns(const Tensor& x, int64_t index) const { return Matrix(x).from(0, index * d); }
};

// Writes the new token's own key and value to the caches, if the op has them.
template <typename Op>
void append_own(const Op& op) {
  if (!op.k_BGd.defined()) return;
  const int64_t width = op.k_cache_BCGd.shape[2];
  for (int64_t b = 0; b < op.q_BHd.rows(); ++b) {
    const int64_t position = op.lengths_B.i32()[b] - 1;
    require(position >= 0 && position < op.k_cache_BCGd.shape[1],
            "position {} of sequence {} does not fit a cache of {} tokens", position, b,
            op.k_cache_BCGd.shape[1]);
    for (const auto& [x, cache] :
         {std::pair(op.k_BGd, op.k_cache_BCGd), std::pair(op.v_BGd, op.v_cache_BCGd)}) {
      std::copy_n(x.f32() + b * x.row_stride, width,
                  cache.f32() + b * cache.row_stride + position * width);
    }
  }
}

template <typename Head, typename Op>
std::vector<Head> make_heads(const Op& op) {
  std::vector<Head> heads;
  for (int64_t h = 0; h < op.params.heads; ++h) heads.emplace_back(op, h);
  return heads;
}

// Calls op(item, head) for each tile or document and each of its heads, with all threads.
template <typename Item, typename Head, typename Op>
void for_each_head(const std::vector<Item>& items, const std::vector<Head>& heads, const Op& op) {
  const auto count = static_cast<int64_t>(heads.size());
  const int64_t tasks = static_cast<int64_t>(items.size()) * count;
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t task = 0; task < tasks; ++task) op(items[task / count], heads[task % count]);
}

// Calls op(document, heads) for each document and each group of heads that share keys and values,
// with all threads. What a group writes to dk and dv has one writer.
template <typename Head, typename Op>
void for_each_group(const std::vector<Document>& documents, std::span<const Head> heads,
                    int64_t group, const Op& op) {
  const auto count = static_cast<int64_t>(heads.size()) / group;
  const int64_t tasks = static_cast<int64_t>(documents.size()) * count;
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t task = 0; task < tasks; ++task) {
    op(documents[task / count], heads.subspan(task % count * group, group));
  }
}

// y [d] += weights[i] times row i of v, the last row first.
void add_values(float* y, Matrix v, int64_t d, int64_t keys, const float* weights);

// One head of one sequence in a decode step: its query, output and cache, [C, d].
struct CachedHead {
  template <typename Op>
  CachedHead(const Op& t, int64_t sequence, int64_t head)
      : index(head),
        d(t.q_BHd.cols() / t.params.heads),
        length(t.lengths_B.i32()[sequence]),
        q(Matrix(t.q_BHd).from(sequence, head * d).data),
        o(Matrix(t.o_BHd).from(sequence, head * d).data),
        k(rows(t.k_cache_BCGd, sequence, key_head(t, head) * d)),
        v(rows(t.v_cache_BCGd, sequence, key_head(t, head) * d)) {
    if constexpr (requires { t.gate_cache_BCH; }) {
      if (t.gate_cache_BCH.defined()) gate = rows(t.gate_cache_BCH, sequence, head);
    }
    require(length > 0 && length <= t.k_cache_BCGd.shape[1],
            "sequence {} has {} tokens in a cache of {}", sequence, length,
            t.k_cache_BCGd.shape[1]);
  }
  // The head of keys and values that the group of query head `head` shares.
  template <typename Op>
  static int64_t key_head(const Op& t, int64_t head) {
    return head / (t.q_BHd.cols() / t.k_cache_BCGd.shape[2]);
  }
  // Row `sequence` of a cache is the matrix [C, N] of one sequence.
  static Matrix rows(const Tensor& cache, int64_t sequence, int64_t column) {
    return {Matrix(cache).from(sequence, column).data, cache.shape[2]};
  }
  // z[i] = scale * q.k of key begin + i.
  void logits(float* z, int64_t begin, int64_t keys, float scale) const;
  // y [d] += weights[i] times the value of key begin + i, the last key first.
  void add_values(float* y, int64_t begin, int64_t keys, const float* weights) const {
    cpu::add_values(y, v.from(begin, 0), d, keys, weights);
  }
  double gate_of(int64_t i) const { return gate ? *gate.row(i) : 1.0; }
  const float* own_value() const { return v.row(length - 1); }
  int64_t index;  // of the head
  int64_t d;
  int64_t length;  // number of keys, the new token's included
  const float* q;
  float* o;
  Matrix k, v;
  Matrix gate;  // [C, 1], if there is one
};
// All heads of sequence 0, then those of sequence 1, and so on.
template <typename Op>
std::vector<CachedHead> make_cached_heads(const Op& t) {
  std::vector<CachedHead> cached;
  for (int64_t b = 0; b < t.q_BHd.rows(); ++b) {
    for (int64_t h = 0; h < t.params.heads; ++h) cached.emplace_back(t, b, h);
  }
  return cached;
}

// Calls op(head) for each, with all threads if that pays.
template <typename Head, typename Op>
void for_each_cached_head(const std::vector<Head>& heads, const Op& op) {
  constexpr int64_t kWorkOfThread = int64_t{1} << 13;  // channels of keys; a bit more than 1 us
  int64_t work = 0;
  for (const Head& head : heads) work += head.length * head.d;
  if (work < omp_get_max_threads() * kWorkOfThread) {
    for (const Head& head : heads) op(head);
    return;
  }
#pragma omp parallel for
  for (const Head& head : heads) op(head);
}

// Scratch of `floats` numbers for each thread.
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

// One thread's memory for the forward pass of one query tile.
struct ForwardScratch {
  static int64_t floats(int64_t head_dim) {
    return 3 * kTile * head_dim + kChunk * (head_dim + kTile);
  }
  ForwardScratch(Scratch scratch, int64_t head_dim);
  // Loads the tile's queries times `scale`, and sets the output to zero.
  void load(const QueryTile& tile, const HeadMatrices& head, float scale) const;
  float *q, *q_t, *o;  // [kTile, d], _t: [d, kTile]
  float *rows, *z;     // [kChunk, d], [kChunk, kTile]
};

// The same for the backward pass. Each op takes more of `scratch` for its scores.
struct BackwardScratch {
  static int64_t floats(int64_t head_dim) { return (5 * kTile + kChunk) * head_dim; }
  BackwardScratch(Scratch& scratch, int64_t head_dim);
  // Loads the tile's queries times `scale` and its output gradients, and sets dq to zero.
  void load(const QueryTile& tile, const HeadMatrices& head, float scale) const;
  float *q, *q_t, *dout, *dout_t, *dq;  // [kTile, d], _t: [d, kTile]
  float* rows;                          // [kChunk, d]
};

}  // namespace sbtrain::ops::cpu
