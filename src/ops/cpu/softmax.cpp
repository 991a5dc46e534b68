// Softmax attention on the CPU, blockwise (FlashAttention-2, arXiv 2307.08691): a running maximum
// and denominator for each query in the forward pass, the saved log-sum-exp in the backward pass.
#include <array>
#include <cmath>
#include <limits>

#include "ops/cpu/attention.h"
#include "ops/cpu/attention_tile.h"
#include "ops/cpu/simd.h"

namespace sbtrain::ops::cpu {
namespace {

constexpr float kMasked = -std::numeric_limits<float>::infinity();
// Stands for "no key yet". Finite, so that differences with kMasked are never NaN.
constexpr float kNoMaximum = std::numeric_limits<float>::lowest();

struct Head {
  const SoftmaxParams& params;
  int64_t index;
  int64_t head_dim;
};

// The keys that some query of the tile sees: [first, end).
struct KeyRange {
  int64_t first;
  int64_t end;
};
KeyRange visible_keys(const QueryTile& tile, int64_t window) {
  const int64_t first = window > 0 ? std::max<int64_t>(0, tile.first - window + 1) : 0;
  return {first, tile.first + tile.count};
}

// Masks logits z [keys, kTile] of keys from `begin` on: query j sees key i when i <= j and, with a
// window, j < i + window.
void mask(float* z, const QueryTile& tile, int64_t begin, int64_t keys, int64_t window) {
  for (int64_t i = 0; i < keys; ++i) {
    const int64_t from = std::clamp<int64_t>(begin + i - tile.first, 0, kTile);
    std::fill(z + i * kTile, z + i * kTile + from, kMasked);
    if (window > 0) {
      const int64_t to = std::clamp<int64_t>(begin + i + window - tile.first, 0, kTile);
      std::fill(z + i * kTile + to, z + (i + 1) * kTile, kMasked);
    }
  }
}

struct Softmax {
  Softmax() { maximum.fill(kNoMaximum); }
  alignas(64) std::array<float, kTile> maximum;
  alignas(64) std::array<float, kTile> denominator{};
  alignas(64) std::array<float, kTile> rescale{};  // of earlier sums, after the last chunk
};

// z becomes exp(z - maximum) with the maximum over the chunks so far.
void exponentiate(Softmax& softmax, float* __restrict z, int64_t keys) {
  float* __restrict rescale = softmax.rescale.data();
  float* __restrict maximum = softmax.maximum.data();
  alignas(64) std::array<float, kTile> sums{};
  float* __restrict sum = sums.data();
  std::copy_n(maximum, kTile, rescale);
  for (int64_t i = 0; i < keys; ++i) {
#pragma omp simd
    for (int64_t q = 0; q < kTile; ++q) {
      maximum[q] = z[i * kTile + q] > maximum[q] ? z[i * kTile + q] : maximum[q];
    }
  }
  for (int64_t i = 0; i < keys; ++i) {
#pragma omp simd
    for (int64_t q = 0; q < kTile; ++q) {
      const float p = simd::exp(z[i * kTile + q] - maximum[q]);
      z[i * kTile + q] = p;
      sum[q] += p;
    }
  }
#pragma omp simd
  for (int64_t q = 0; q < kTile; ++q) {
    rescale[q] = simd::exp(rescale[q] - maximum[q]);
    softmax.denominator[q] = softmax.denominator[q] * rescale[q] + sum[q];
  }
}

void scale_rows(float* rows, const float* factors, int64_t head_dim) {
  for (int64_t q = 0; q < kTile; ++q) {
#pragma omp simd
    for (int64_t c = 0; c < head_dim; ++c) rows[q * head_dim + c] *= factors[q];
  }
}

void forward_tile(const SoftmaxForward& t, const QueryTile& tile, const Head& head,
                  Scratch scratch) {
  const int64_t d = head.head_dim;
  float* q = scratch.take(kTile * d);
  float* q_t = scratch.take(kTile * d);
  float* o = scratch.take(kTile * d);
  float* rows = scratch.take(kChunk * d);
  float* z = scratch.take(kChunk * kTile);
  const int64_t start = tile.document.begin;
  pack(q, head_rows(t.q_THd, head.index, d, start + tile.first), tile.count, kTile, d,
       head.params.scale);
  transpose(q_t, q, d);
  std::fill(o, o + kTile * d, 0.0f);

  Softmax softmax;
  const KeyRange range = visible_keys(tile, head.params.window);
  for (int64_t begin = range.first; begin < range.end; begin += kChunk) {
    const int64_t keys = std::min(kChunk, range.end - begin);
    pack(rows, head_rows(t.k_THd, head.index, d, start + begin), keys, keys, d, 1.0f);
    score(z, rows, q_t, keys, d);
    mask(z, tile, begin, keys, head.params.window);
    exponentiate(softmax, z, keys);
    scale_rows(o, softmax.rescale.data(), d);
    pack(rows, head_rows(t.v_THd, head.index, d, start + begin), keys, keys, d, 1.0f);
    mix(o, z, rows, keys, d);
  }

  const HeadRows out = head_rows(t.o_THd, head.index, d, start + tile.first);
  float* lse = t.lse_HT.f32() + head.index * t.lse_HT.row_stride + start + tile.first;
  for (int64_t j = 0; j < tile.count; ++j) {
    lse[j] = softmax.maximum[j] + std::log(softmax.denominator[j]);
    const float inverse = 1.0f / softmax.denominator[j];
    for (int64_t c = 0; c < d; ++c) out.data[j * out.stride + c] = o[j * d + c] * inverse;
  }
}

// One thread's memory for the backward pass of one query tile.
struct BackwardScratch {
  BackwardScratch(Scratch scratch, int64_t head_dim)
      : q(scratch.take(kTile * head_dim)),
        q_t(scratch.take(kTile * head_dim)),
        dout(scratch.take(kTile * head_dim)),
        dout_t(scratch.take(kTile * head_dim)),
        dq(scratch.take(kTile * head_dim)),
        rows(scratch.take(kChunk * head_dim)),
        p(scratch.take(kChunk * kTile)),
        dp(scratch.take(kChunk * kTile)) {}
  float *q, *q_t, *dout, *dout_t, *dq, *rows, *p, *dp;
};

// z becomes P = exp(z - lse), dp becomes dz = P (dp - delta).
void exponentiate_backward(float* __restrict z, float* __restrict dp, const float* __restrict lse,
                           const float* __restrict delta, int64_t keys) {
  for (int64_t i = 0; i < keys; ++i) {
#pragma omp simd
    for (int64_t q = 0; q < kTile; ++q) {
      const float p = simd::exp(z[i * kTile + q] - lse[q]);
      z[i * kTile + q] = p;
      dp[i * kTile + q] = p * (dp[i * kTile + q] - delta[q]);
    }
  }
}

// delta_j = do_j.o_j and lse_j of the tile's queries; zeros behind them.
void load_statistics(const SoftmaxBackward& t, const QueryTile& tile, const Head& head,
                     const float* dout, float* lse, float* delta) {
  const int64_t d = head.head_dim;
  const int64_t token = tile.document.begin + tile.first;
  const HeadRows o = head_rows(t.o_THd, head.index, d, token);
  std::copy_n(t.lse_HT.f32() + head.index * t.lse_HT.row_stride + token, tile.count, lse);
  for (int64_t j = 0; j < tile.count; ++j) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < d; ++c) sum += dout[j * d + c] * o.data[j * o.stride + c];
    delta[j] = sum;
  }
}

void backward_tile(const SoftmaxBackward& t, const QueryTile& tile, const Head& head,
                   const BackwardScratch& m) {
  const int64_t d = head.head_dim;
  const int64_t start = tile.document.begin;
  const int64_t token = start + tile.first;
  pack(m.q, head_rows(t.q_THd, head.index, d, token), tile.count, kTile, d, head.params.scale);
  transpose(m.q_t, m.q, d);
  pack(m.dout, head_rows(t.do_THd, head.index, d, token), tile.count, kTile, d, 1.0f);
  transpose(m.dout_t, m.dout, d);
  std::fill(m.dq, m.dq + kTile * d, 0.0f);
  alignas(64) std::array<float, kTile> lse{};
  alignas(64) std::array<float, kTile> delta{};
  load_statistics(t, tile, head, m.dout, lse.data(), delta.data());

  const KeyRange range = visible_keys(tile, head.params.window);
  for (int64_t begin = range.first; begin < range.end; begin += kChunk) {
    const int64_t keys = std::min(kChunk, range.end - begin);
    const HeadRows k = head_rows(t.k_THd, head.index, d, start + begin);
    pack(m.rows, head_rows(t.v_THd, head.index, d, start + begin), keys, keys, d, 1.0f);
    score(m.dp, m.rows, m.dout_t, keys, d);
    pack(m.rows, k, keys, keys, d, 1.0f);
    score(m.p, m.rows, m.q_t, keys, d);
    mask(m.p, tile, begin, keys, head.params.window);
    exponentiate_backward(m.p, m.dp, lse.data(), delta.data(), keys);
    scatter(head_rows(t.dv_THd, head.index, d, start + begin), m.p, m.dout, keys, d);
    scatter(head_rows(t.dk_THd, head.index, d, start + begin), m.dp, m.q, keys, d);
    mix(m.dq, m.dp, m.rows, keys, d);
  }
  const HeadRows dq = head_rows(t.dq_THd, head.index, d, token);
  for (int64_t j = 0; j < tile.count; ++j) {
    for (int64_t c = 0; c < d; ++c) {
      dq.data[j * dq.stride + c] = head.params.scale * m.dq[j * d + c];
    }
  }
}

// All of one head in one document: only this call touches its dk and dv, tile after tile, so the
// sums have one order.
void backward_document(const SoftmaxBackward& t, const Document& document, const Head& head,
                       const BackwardScratch& m) {
  zero_head(t.dk_THd, head.index, head.head_dim, document);
  zero_head(t.dv_THd, head.index, head.head_dim, document);
  for (int64_t first = 0; first < document.length; first += kTile) {
    const QueryTile tile{document, first, std::min(kTile, document.length - first)};
    backward_tile(t, tile, head, m);
  }
}

// One new token of one sequence and head against its cache.
void decode_head(const DecodeTensors& t, int64_t sequence, const Head& head) {
  const int64_t d = head.head_dim;
  const CachedHead cached(t, sequence, head.index, d);
  float* o = t.o_BHd.f32() + sequence * t.o_BHd.row_stride + head.index * d;
  std::fill_n(o, d, 0.0f);
  const int64_t window = head.params.window;
  float maximum = kNoMaximum;
  float denominator = 0.0f;
  alignas(64) std::array<float, kTile> p{};
  for (int64_t begin = window > 0 ? std::max<int64_t>(0, cached.length - window) : 0;
       begin < cached.length; begin += kTile) {
    const int64_t keys = std::min(kTile, cached.length - begin);
    cached.logits(p.data(), begin, keys, head.params.scale);
    const float before = maximum;
    for (int64_t i = 0; i < keys; ++i) maximum = std::max(maximum, p[i]);
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < keys; ++i) {
      p[i] = simd::exp(p[i] - maximum);
      sum += p[i];
    }
    const float rescale = std::exp(before - maximum);
    denominator = denominator * rescale + sum;
#pragma omp simd
    for (int64_t c = 0; c < d; ++c) o[c] *= rescale;
    for (int64_t i = 0; i < keys; ++i) cached.add_value(o, begin + i, p[i]);
  }
  for (int64_t c = 0; c < d; ++c) o[c] /= denominator;
}

}  // namespace

Buffer softmax_forward_scratch(const Stream& s, int64_t head_dim) {
  return thread_scratch(s, "softmax forward",
                        3 * kTile * head_dim + kChunk * head_dim + kChunk * kTile);
}

Buffer softmax_backward_scratch(const Stream& s, int64_t head_dim) {
  return thread_scratch(s, "softmax backward",
                        5 * kTile * head_dim + kChunk * head_dim + 2 * kChunk * kTile);
}

void softmax_forward(Stream& s, const SoftmaxForward& t, const Sequences& sequences,
                     const SoftmaxParams& params) {
  const std::vector<QueryTile> tiles = query_tiles_by_keys(sequences, t.q_THd.rows());
  const int64_t head_dim = t.q_THd.cols() / params.heads;
  const Buffer scratch = softmax_forward_scratch(s, head_dim);
  const int64_t tasks = static_cast<int64_t>(tiles.size()) * params.heads;
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t task = 0; task < tasks; ++task) {
    const Head head{params, task % params.heads, head_dim};
    forward_tile(t, tiles[task / params.heads], head, Scratch(scratch));
  }
}

void softmax_backward(Stream& s, const SoftmaxBackward& t, const Sequences& sequences,
                      const SoftmaxParams& params) {
  const std::vector<Document> documents = documents_by_length(sequences, t.q_THd.rows());
  const int64_t head_dim = t.q_THd.cols() / params.heads;
  const Buffer scratch = softmax_backward_scratch(s, head_dim);
  const int64_t tasks = static_cast<int64_t>(documents.size()) * params.heads;
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t task = 0; task < tasks; ++task) {
    const Head head{params, task % params.heads, head_dim};
    const BackwardScratch memory(Scratch(scratch), head_dim);
    backward_document(t, documents[task / params.heads], head, memory);
  }
}

void softmax_decode(Stream& s, const DecodeTensors& t, const SoftmaxParams& params) {
  const int64_t head_dim = t.q_BHd.cols() / params.heads;
  const int64_t tasks = t.q_BHd.rows() * params.heads;
#pragma omp parallel for
  for (int64_t task = 0; task < tasks; ++task) {
    decode_head(t, task / params.heads, {params, task % params.heads, head_dim});
  }
}

}  // namespace sbtrain::ops::cpu
