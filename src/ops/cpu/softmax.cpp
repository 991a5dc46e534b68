// Softmax attention on the CPU, blockwise (FlashAttention-2, arXiv 2307.08691): a running maximum
// and denominator for each query in the forward pass, the saved log-sum-exp in the backward pass.
#include <array>
#include <cmath>
#include <limits>

#include "ops/cpu/attention_tile.h"
#include "ops/cpu/position_bias.h"
#include "ops/cpu/simd.h"
#include "ops/far_softmax.h"

namespace sbtrain::ops::cpu {
namespace {

constexpr float kMasked = -std::numeric_limits<float>::infinity();
// Stands for "no key yet". Finite, so that differences with kMasked are never NaN.
constexpr float kNoMaximum = std::numeric_limits<float>::lowest();

struct Head : HeadMatrices {
  template <typename Op>
  Head(const Op& t, int64_t index)
      : HeadMatrices(t, index),
        params(t.params),
        position(t.bias, t.params.heads, index),
        lse(Matrix(t.lse_HT).row(index)) {}

  SoftmaxParams params;
  HeadBias position;
  float* lse;  // [T]
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

void forward_tile(const QueryTile& tile, const Head& head, const ForwardScratch& m) {
  const int64_t d = head.d;
  const int64_t start = tile.document.begin;
  m.load(tile, head, head.params.scale);

  Softmax softmax;
  FireQueries queries;
  head.position.set_queries(queries, tile.first, 1);
  const KeyRange range = visible_keys(tile, head.params.window);
  for (int64_t begin = range.first; begin < range.end; begin += kChunk) {
    const int64_t keys = std::min(kChunk, range.end - begin);
    pack(m.rows, head.k.from(start + begin, 0), keys, keys, d, 1.0f);
    score(m.z, m.rows, m.q_t, keys, d);
    head.position.add_tile(m.z, queries, tile, begin, keys);
    mask(m.z, tile, begin, keys, head.params.window);
    exponentiate(softmax, m.z, keys);
    scale_rows(m.o, softmax.rescale.data(), d);
    pack(m.rows, head.v.from(start + begin, 0), keys, keys, d, 1.0f);
    mix(m.o, m.z, m.rows, keys, d);
  }

  for (int64_t j = 0; j < tile.count; ++j) {
    const int64_t token = start + tile.first + j;
    head.lse[token] = softmax.maximum[j] + std::log(softmax.denominator[j]);
    const float inverse = 1.0f / softmax.denominator[j];
    for (int64_t c = 0; c < d; ++c) head.o.row(token)[c] = m.o[j * d + c] * inverse;
  }
}

struct LogitScratch : BackwardScratch {
  static int64_t floats(int64_t head_dim) {
    return BackwardScratch::floats(head_dim) + 2 * kChunk * kTile;
  }
  LogitScratch(Scratch scratch, int64_t head_dim)
      : BackwardScratch(scratch, head_dim),
        p(scratch.take(kChunk * kTile)),
        dp(scratch.take(kChunk * kTile)) {}
  float *p, *dp;  // [kChunk, kTile]
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

// delta_j = do_j.o_j of the tile's queries.
void load_delta(const QueryTile& tile, const Head& head, const float* dout, float* delta) {
  const int64_t d = head.d;
  for (int64_t j = 0; j < tile.count; ++j) {
    const float* o = head.o.row(tile.document.begin + tile.first + j);
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < d; ++c) sum += dout[j * d + c] * o[c];
    delta[j] = sum;
  }
}

void backward_tile(const QueryTile& tile, const Head& head, const LogitScratch& m, FireSums& fire) {
  const int64_t d = head.d;
  const int64_t start = tile.document.begin;
  const int64_t token = start + tile.first;
  m.load(tile, head, head.params.scale);
  alignas(64) std::array<float, kTile> lse;
  alignas(64) std::array<float, kTile> delta{};
  lse.fill(std::numeric_limits<float>::infinity());  // lanes without a query: P = 0
  std::copy_n(head.lse + token, tile.count, lse.data());
  load_delta(tile, head, m.dout, delta.data());
  FireQueries queries;
  head.position.set_queries(queries, tile.first, 1);

  const KeyRange range = visible_keys(tile, head.params.window);
  for (int64_t begin = range.first; begin < range.end; begin += kChunk) {
    const int64_t keys = std::min(kChunk, range.end - begin);
    const Matrix k = head.k.from(start + begin, 0);
    pack(m.rows, head.v.from(start + begin, 0), keys, keys, d, 1.0f);
    score(m.dp, m.rows, m.dout_t, keys, d);
    pack(m.rows, k, keys, keys, d, 1.0f);
    score(m.p, m.rows, m.q_t, keys, d);
    head.position.add_tile(m.p, queries, tile, begin, keys);
    mask(m.p, tile, begin, keys, head.params.window);
    exponentiate_backward(m.p, m.dp, lse.data(), delta.data(), keys);
    head.position.sum_tile(fire, m.dp, queries, tile, begin, keys);
    scatter(head.dv.from(start + begin, 0), m.p, m.dout, keys, d);
    scatter(head.dk.from(start + begin, 0), m.dp, m.q, keys, d);
    mix(m.dq, m.dp, m.rows, keys, d);
  }
  for (int64_t j = 0; j < tile.count; ++j) {
    float* dq = head.dq.row(token + j);
    for (int64_t c = 0; c < d; ++c) dq[c] = head.params.scale * m.dq[j * d + c];
  }
}

// Computes all of one group of heads in one document. Only this call writes its dk and dv, head
// after head and tile after tile, so that the sums have one order. `fire` has the sums of each head
// of the group.
void backward_document(const Document& document, std::span<const Head> group,
                       const LogitScratch& memory, FireSums* fire) {
  zero(group.front().dk.from(document.begin, 0), document.length, group.front().d);
  zero(group.front().dv.from(document.begin, 0), document.length, group.front().d);
  for (const Head& head : group) {
    for (int64_t first = 0; first < document.length; first += kTile) {
      backward_tile({document, first, std::min(kTile, document.length - first)}, head, memory,
                    *fire);
    }
    ++fire;
  }
}

// ---- Keys of other ranks (ops/far_softmax.h). Keys are counted as they lie in their tensors, and
// queries from the first of these on.

struct FarHead : Head {
  template <typename Op>
  FarHead(const Op& t, int64_t index)
      : Head(t, index), first_key(t.k_THd.rows() - t.far.keys), end_key(t.k_THd.rows()) {}
  int64_t first_key, end_key;
};

// Tiles of the queries that see the keys, and where they stand among these.
struct FarTile {
  QueryTile tile, placed;
};
template <typename Op>
std::vector<FarTile> far_tiles(const Op& op) {
  std::vector<FarTile> tiles;
  if (op.far.keys == 0) return tiles;
  for (int64_t first = 0; first < op.far.queries; first += kTile) {
    const QueryTile tile{{0, op.far.queries}, first, std::min(kTile, op.far.queries - first)};
    tiles.push_back({tile, {tile.document, first + op.distance, tile.count}});
  }
  return tiles;
}
int64_t first_visible(const FarTile& x, const FarHead& head) {
  return std::max(head.first_key, visible_keys(x.placed, head.params.window).first);
}

// Merges what the range gives to a query, o of length d and the denominator of exp(z - maximum),
// with what o and lse hold.
void merge(float* o, float& lse, const float* added, float maximum, float denominator, int64_t d) {
  if (denominator == 0.0f) return;  // the window hides all keys
  const float of_range = maximum + std::log(denominator);
  const float larger = std::max(lse, of_range);
  const float both = larger + std::log1p(std::exp(std::min(lse, of_range) - larger));
  const float keep = std::exp(lse - both);
  const float add = std::exp(of_range - both) / denominator;
  for (int64_t c = 0; c < d; ++c) o[c] = keep * o[c] + add * added[c];
  lse = both;
}

void far_forward_tile(const FarTile& x, const FarHead& head, const ForwardScratch& m) {
  const int64_t d = head.d;
  m.load(x.tile, head, head.params.scale);
  Softmax softmax;
  const FireQueries none{};
  for (int64_t begin = first_visible(x, head); begin < head.end_key; begin += kChunk) {
    const int64_t keys = std::min(kChunk, head.end_key - begin);
    pack(m.rows, head.k.from(begin, 0), keys, keys, d, 1.0f);
    score(m.z, m.rows, m.q_t, keys, d);
    head.position.add_tile(m.z, none, x.placed, begin, keys);
    mask(m.z, x.placed, begin, keys, head.params.window);
    exponentiate(softmax, m.z, keys);
    scale_rows(m.o, softmax.rescale.data(), d);
    pack(m.rows, head.v.from(begin, 0), keys, keys, d, 1.0f);
    mix(m.o, m.z, m.rows, keys, d);
  }
  for (int64_t j = 0; j < x.tile.count; ++j) {
    const int64_t token = x.tile.first + j;
    merge(head.o.row(token), head.lse[token], m.o + j * d, softmax.maximum[j],
          softmax.denominator[j], d);
  }
}

void far_backward_tile(const FarTile& x, const FarHead& head, const LogitScratch& m) {
  const int64_t d = head.d;
  m.load(x.tile, head, head.params.scale);
  alignas(64) std::array<float, kTile> lse;
  alignas(64) std::array<float, kTile> delta{};
  lse.fill(std::numeric_limits<float>::infinity());  // lanes without a query: P = 0
  std::copy_n(head.lse + x.tile.first, x.tile.count, lse.data());
  load_delta(x.tile, head, m.dout, delta.data());
  const FireQueries none{};
  for (int64_t begin = first_visible(x, head); begin < head.end_key; begin += kChunk) {
    const int64_t keys = std::min(kChunk, head.end_key - begin);
    const Matrix k = head.k.from(begin, 0);
    pack(m.rows, head.v.from(begin, 0), keys, keys, d, 1.0f);
    score(m.dp, m.rows, m.dout_t, keys, d);
    pack(m.rows, k, keys, keys, d, 1.0f);
    score(m.p, m.rows, m.q_t, keys, d);
    head.position.add_tile(m.p, none, x.placed, begin, keys);
    mask(m.p, x.placed, begin, keys, head.params.window);
    exponentiate_backward(m.p, m.dp, lse.data(), delta.data(), keys);
    scatter(head.dv.from(begin, 0), m.p, m.dout, keys, d);
    scatter(head.dk.from(begin, 0), m.dp, m.q, keys, d);
    mix(m.dq, m.dp, m.rows, keys, d);
  }
  for (int64_t j = 0; j < x.tile.count; ++j) {
    float* dq = head.dq.row(x.tile.first + j);
    for (int64_t c = 0; c < d; ++c) dq[c] += head.params.scale * m.dq[j * d + c];
  }
}

// Computes one head of the new token of one sequence against its cache.
void decode_head(const CachedHead& cached, const HeadBias& position, const SoftmaxParams& params) {
  const int64_t d = cached.d;
  float* o = cached.o;
  std::fill_n(o, d, 0.0f);
  float maximum = kNoMaximum;
  float denominator = 0.0f;
  alignas(64) std::array<float, kTile> p{};
  FireQueries queries;
  position.set_queries(queries, cached.length - 1, 0);
  int64_t begin = params.window > 0 ? std::max<int64_t>(0, cached.length - params.window) : 0;
  for (; begin < cached.length; begin += kTile) {
    const int64_t keys = std::min(kTile, cached.length - begin);
    cached.logits(p.data(), begin, keys, params.scale);
    position.add(p.data(), queries, cached.length - 1 - begin, -1);
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
    cached.add_values(o, begin, keys, p.data());
  }
  for (int64_t c = 0; c < d; ++c) o[c] /= denominator;
}

}  // namespace

Buffer scratch(const Stream& s, const SoftmaxForward& op) {
  return thread_scratch(s, "softmax forward", ForwardScratch::floats(head_dim(op)));
}

Buffer scratch(const Stream& s, const SoftmaxBackward& op) {
  return thread_scratch(s, "softmax backward", LogitScratch::floats(head_dim(op)));
}

void run(Cpu, Stream& /*s*/, const SoftmaxForward& op, const Buffer& scratch) {
  const auto heads = make_heads<Head>(op);
  for_each_head(query_tiles_by_keys(op.sequences, op.q_THd.rows()), heads,
                [&](const QueryTile& tile, const Head& head) {
                  forward_tile(tile, head, {Scratch(scratch), head.d});
                });
}

void run(Cpu, Stream& /*s*/, const SoftmaxBackward& op, const Buffer& scratch) {
  const auto heads = make_heads<Head>(op);
  const std::vector<Document> documents = documents_by_length(op.sequences, op.q_THd.rows());
  const int64_t group = queries_of_key(op.q_THd, op.k_THd);
  if (op.bias.kind != PositionBias::kFire) {
    for_each_group(documents, std::span(heads), group,
                   [&](const Document& document, std::span<const Head> heads_of_group) {
                     std::vector<FireSums> none(heads_of_group.size());
                     backward_document(document, heads_of_group,
                                       {Scratch(scratch), heads_of_group.front().d}, none.data());
                   });
    return;
  }
  // FIRE's sums run over all documents, so each group is one task: this gives them one order.
  std::vector<FireSums> sums(heads.size());
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t first = 0; first < op.params.heads; first += group) {
    const std::span<const Head> mine = std::span(heads).subspan(first, group);
    for (const Document& document : documents) {
      backward_document(document, mine, {Scratch(scratch), mine.front().d}, &sums[first]);
    }
  }
  add_fire_gradients(op.dfire, op.bias.fire, sums);
}

Buffer scratch(const Stream& s, const SoftmaxFarForward& op) {
  return thread_scratch(s, "softmax far forward", ForwardScratch::floats(head_dim(op)));
}

Buffer scratch(const Stream& s, const SoftmaxFarBackward& op) {
  return thread_scratch(s, "softmax far backward", LogitScratch::floats(head_dim(op)));
}

void run(Cpu, Stream& /*s*/, const SoftmaxFarForward& op, const Buffer& scratch) {
  const auto heads = make_heads<FarHead>(op);
  for_each_head(far_tiles(op), heads, [&](const FarTile& tile, const FarHead& head) {
    far_forward_tile(tile, head, {Scratch(scratch), head.d});
  });
}

// One thread adds to the dk and dv of a group, tile after tile of head after head.
void run(Cpu, Stream& /*s*/, const SoftmaxFarBackward& op, const Buffer& scratch) {
  const auto heads = make_heads<FarHead>(op);
  const std::vector<FarTile> tiles = far_tiles(op);
  const std::vector<Document> whole(tiles.empty() ? 0 : 1);
  for_each_group(whole, std::span(heads), queries_of_key(op.q_THd, op.k_THd),
                 [&](const Document&, std::span<const FarHead> group) {
                   const LogitScratch m(Scratch(scratch), group.front().d);
                   for (const FarHead& head : group) {
                     for (const FarTile& tile : tiles) far_backward_tile(tile, head, m);
                   }
                 });
}

void run(Cpu, Stream& /*s*/, const SoftmaxDecode& op, const Buffer& /*scratch*/) {
  append_own(op);
  const std::vector<CachedHead> cached = make_cached_heads(op);
  std::vector<HeadBias> positions;
  for (int h = 0; h < op.params.heads; ++h) positions.emplace_back(op.bias, op.params.heads, h);
  for_each_cached_head(
      cached, [&](const CachedHead& head) { decode_head(head, positions[head.index], op.params); });
}

}  // namespace sbtrain::ops::cpu
