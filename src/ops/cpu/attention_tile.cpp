#include "ops/cpu/attention_tile.h"

#include "core/error.h"
#include "ops/cpu/lanes.h"

namespace sbtrain::ops::cpu {

std::vector<Document> documents_by_length(const Sequences& sequences, int64_t tokens) {
  const int32_t* bounds = sequences.cu_seqlens.i32();
  require(bounds[0] == 0 && bounds[sequences.count] == tokens,
          "cu_seqlens covers tokens [{}, {}) of {}", bounds[0], bounds[sequences.count], tokens);
  std::vector<Document> documents;
  for (int64_t n = 0; n < sequences.count; ++n) {
    const int64_t length = int64_t{bounds[n + 1]} - bounds[n];
    require(length >= 0 && length <= sequences.max_seqlen,
            "document {} of the micro-batch has {} tokens; at most {} were announced", n, length,
            sequences.max_seqlen);
    if (length > 0) documents.push_back({bounds[n], length});
  }
  std::stable_sort(documents.begin(), documents.end(),
                   [](const Document& a, const Document& b) { return a.length > b.length; });
  return documents;
}

std::vector<QueryTile> query_tiles_by_keys(const Sequences& sequences, int64_t tokens) {
  std::vector<QueryTile> tiles;
  for (const Document& document : documents_by_length(sequences, tokens)) {
    for (int64_t first = 0; first < document.length; first += kTile) {
      tiles.push_back({document, first, std::min(kTile, document.length - first)});
    }
  }
  std::stable_sort(tiles.begin(), tiles.end(),
                   [](const QueryTile& a, const QueryTile& b) { return a.first > b.first; });
  return tiles;
}

void pack(float* dst, Matrix src, int64_t count, int64_t padded, int64_t head_dim, float scale) {
  for (int64_t i = 0; i < count; ++i) {
    const float* row = src.row(i);
#pragma omp simd
    for (int64_t c = 0; c < head_dim; ++c) dst[i * head_dim + c] = scale * row[c];
  }
  std::fill(dst + count * head_dim, dst + padded * head_dim, 0.0f);
}

void transpose(float* dst, const float* rows, int64_t head_dim) {
  for (int64_t c = 0; c < head_dim; ++c) {
    for (int64_t q = 0; q < kTile; ++q) dst[c * kTile + q] = rows[q * head_dim + c];
  }
}

void zero(Matrix x, int64_t rows, int64_t cols) {
  for (int64_t i = 0; i < rows; ++i) std::fill_n(x.row(i), cols, 0.0f);
}

ForwardScratch::ForwardScratch(Scratch scratch, int64_t head_dim)
    : q(scratch.take(kTile * head_dim)),
      q_t(scratch.take(kTile * head_dim)),
      o(scratch.take(kTile * head_dim)),
      rows(scratch.take(kChunk * head_dim)),
      z(scratch.take(kChunk * kTile)) {}

void ForwardScratch::load(const QueryTile& tile, const HeadMatrices& head, float scale) const {
  const int64_t token = tile.document.begin + tile.first;
  pack(q, head.q.from(token, 0), tile.count, kTile, head.d, scale);
  transpose(q_t, q, head.d);
  std::fill_n(o, kTile * head.d, 0.0f);
}

BackwardScratch::BackwardScratch(Scratch& scratch, int64_t head_dim)
    : q(scratch.take(kTile * head_dim)),
      q_t(scratch.take(kTile * head_dim)),
      dout(scratch.take(kTile * head_dim)),
      dout_t(scratch.take(kTile * head_dim)),
      dq(scratch.take(kTile * head_dim)),
      rows(scratch.take(kChunk * head_dim)) {}

void BackwardScratch::load(const QueryTile& tile, const HeadMatrices& head, float scale) const {
  const int64_t token = tile.document.begin + tile.first;
  pack(q, head.q.from(token, 0), tile.count, kTile, head.d, scale);
  transpose(q_t, q, head.d);
  pack(dout, head.dout.from(token, 0), tile.count, kTile, head.d, 1.0f);
  transpose(dout_t, dout, head.d);
  std::fill_n(dq, kTile * head.d, 0.0f);
}

void CachedHead::logits(float* z, int64_t begin, int64_t keys, float scale) const {
  skinny_gemm(1, keys, d, scale, q, d, k.row(begin), k.stride, false, z, keys);
}

void add_values(float* y, Matrix v, int64_t d, int64_t keys, const float* weights) {
  int64_t c = 0;
  for (; c + kLanes <= d; c += kLanes) {
    Lanes sums = load_lanes(y + c);
    for (int64_t i = keys - 1; i >= 0; --i) sums += weights[i] * load_lanes(v.row(i) + c);
    store_lanes(y + c, sums);
  }
  for (int64_t i = keys - 1; c < d && i >= 0; --i) {
    const float* value = v.row(i);
    for (int64_t n = c; n < d; ++n) y[n] += weights[i] * value[n];
  }
}

void run(Cpu, Stream& /*s*/, const CacheAppend& op) {
  const int64_t capacity = op.cache_BCN.shape[1];
  const int64_t width = op.cache_BCN.shape[2];
  for (int64_t b = 0; b < op.x_BN.rows(); ++b) {
    const int64_t position = op.positions_B.i32()[b];
    require(position >= 0 && position < capacity,
            "position {} of sequence {} does not fit a cache of {} tokens", position, b, capacity);
    std::copy_n(op.x_BN.f32() + b * op.x_BN.row_stride, width,
                op.cache_BCN.f32() + b * op.cache_BCN.row_stride + position * width);
  }
}

}  // namespace sbtrain::ops::cpu
