// Stick-breaking attention on the CPU (arXiv 2410.17980, equations 1-4).
//
// For one query j, going over its keys from the nearest to the farthest, T is what is left of the
// stick: T = 1 at first, then for each key A = beta T and T <- T (1 - beta). After the last key
// rem = T. In this product form a key costs one exponential, and nothing can overflow.
//
// Backward. Let drem be the gradient of rem: drem_HT, if given, and what rem adds to o gives. Let
// a_i = do.v_i - drem and T_i the stick left before key i. Take W_i = sum_{i'<i}
// A_i' a_i' / (T_i (1 - beta_i)), the mean of a over what a fresh stick would give to the keys left
// of i. Then
//   dL/dbeta_i = T_i (a_i - W_i),    W_{i+1} = W_i + beta_i (a_i - W_i),    W_first = 0,
// which equals the paper's dz_i = g_i - beta_i sum_{i'<=i} g_i' (g = A a, its printed upper limit
// j-1 is a typo), but divides by nothing and adds convex combinations only: it stays exact when
// beta saturates, with a forget gate too. T runs from right to left and W from left to right, so
// a query tile makes two passes and keeps T and sigma of all its keys in scratch.
#include <array>
#include <cmath>
#include <limits>
#include <type_traits>

#include "ops/cpu/attention_tile.h"
#include "ops/cpu/simd.h"
#include "ops/far_keys.h"
#include "ops/kept_keys.h"

namespace sbtrain::ops::cpu {
namespace {

// A shorter stick counts as used up. This keeps subnormal numbers, which are slow, out of products.
constexpr double kShortestStick = 0x1p-80;
// Logits are clamped to this magnitude. exp(-80) is far below any sum it could enter and still a
// normal number.
constexpr float kLargestLogit = 80.0f;

// One key against the 64 queries of a tile. `z` holds the logits and becomes A.
// sigma(z) and 1 - sigma(z) both come from exp(-|z|), so neither suffers cancellation, and the
// stick is kept in fp64: thousands of tiny betas would vanish against 1 in fp32.
// With kSave it also writes what the backward pass needs: the stick before this key, and sigma (see
// Sigma).
template <bool kGated, bool kSave>
void break_stick(float* __restrict z, double* __restrict stick, float gate,
                 float* __restrict stick_before, float* __restrict sigma_code) {
#pragma omp simd
  for (int64_t q = 0; q < kTile; ++q) {
    const bool positive = z[q] > 0.0f;
    const float magnitude = simd::abs(z[q]);
    const float e = simd::exp(magnitude < kLargestLogit ? -magnitude : -kLargestLogit);
    const float large = 1.0f / (1.0f + e);  // sigma(|z|)
    const float small = e * large;          // sigma(-|z|)
    const double left = stick[q];
    const auto left32 = static_cast<float>(left);
    float beta = positive ? large : small;
    double keep = positive ? static_cast<double>(small) : 1.0 - static_cast<double>(small);
    if constexpr (kGated) {
      const double closed = 1.0 - static_cast<double>(gate);
      keep = keep * static_cast<double>(gate) + closed;
      beta *= gate;
    }
    if constexpr (kSave) {
      stick_before[q] = left32;
      sigma_code[q] = positive ? -small : small;
    }
    z[q] = beta * left32;
    const double rest = left * keep;
    stick[q] = rest < kShortestStick ? 0.0 : rest;
  }
}

struct Head : HeadMatrices {
  template <typename Op>
  Head(const Op& t, int64_t index)
      : HeadMatrices(t, index),
        params(t.params),
        log2_rem(Matrix(t.log2_rem_HT).row(index)),
        stop(t.stop_HT.i32() + index * t.stop_HT.row_stride) {
    if (t.gate_TH.defined()) gate = Matrix(t.gate_TH).from(0, index);
    if (params.remainder == Remainder::kBias) bias = t.remainder_bias_Hd.f32() + index * d;
    if constexpr (std::is_same_v<Op, StickBreakingBackward>) {
      if (gate) dgate = Matrix(t.dgate_TH).from(0, index);
      if (bias) dbias = t.dremainder_bias_Hd.f32() + index * d;
      if (t.drem_HT.defined()) drem = Matrix(t.drem_HT).row(index);
    }
  }

  StickBreakingParams params;
  float* log2_rem;     // [T]
  int32_t* stop;       // [T]
  Matrix gate, dgate;  // [T, 1], if there is one
  float *bias = nullptr, *dbias = nullptr;
  const float* drem = nullptr;  // [T], if it is given
};

// The state of one query tile while it walks over the keys.
struct Sticks {
  alignas(64) std::array<double, kTile> length{};  // 0 until the query's first key is reached
  bool all_below(float epsilon) const {
    return std::all_of(length.begin(), length.end(), [&](double l) { return l < epsilon; });
  }
};

// The query of the tile for which `key` is the first key, going left: its stick is whole there.
int64_t starting_lane(const QueryTile& tile, int64_t key, bool attend_current) {
  return key - tile.first + (attend_current ? 0 : 1);
}

// Keys [begin, begin + keys) of the tile's document, from right to left: logits `z` become A. With
// kSave, stick_before and sigma_code are written too.
template <bool kGated, bool kSave>
void break_sticks(Sticks& sticks, float* z, const QueryTile& tile, int64_t begin, int64_t keys,
                  const Head& head, float* stick_before, float* sigma_code) {
  const int64_t token = tile.document.begin + begin;
  for (int64_t i = keys - 1; i >= 0; --i) {
    const int64_t lane = starting_lane(tile, begin + i, head.params.attend_current);
    if (lane >= 0 && lane < tile.count) sticks.length[lane] = 1.0;
    const float gate = kGated ? *head.gate.row(token + i) : 1.0f;
    float* before = kSave ? stick_before + i * kTile : nullptr;
    float* sigma = kSave ? sigma_code + i * kTile : nullptr;
    break_stick<kGated, kSave>(z + i * kTile, sticks.length.data(), gate, before, sigma);
  }
  // The first token of a document sees no key: all of its stick remains.
  if (begin == 0 && tile.first == 0 && !head.params.attend_current) sticks.length[0] = 1.0;
}

int64_t keys_end(const QueryTile& tile) {
  return tile.first + tile.count;
}

// Where the chunk that ends at `end` begins, not left of `stop`. A tile's first chunk reaches past
// the first key of its first query, so after it every query has started.
static_assert(kChunk > kTile);
int64_t chunk_begin(int64_t end, int64_t stop) {
  return std::max(stop, end - kChunk);
}

// Clamped, so that it is finite.
float log2_of(double stick) {
  constexpr double kLeast = std::numeric_limits<double>::min();
  return static_cast<float>(std::log2(std::max(stick, kLeast)));
}

// Adds the remainder and writes the tile's output, rem and stop.
void finish_tile(const QueryTile& tile, const Head& head, const Sticks& sticks, const float* o,
                 int64_t stop) {
  const int64_t token = tile.document.begin + tile.first;
  for (int64_t q = 0; q < tile.count; ++q) {
    const auto rem = static_cast<float>(sticks.length[q]);
    head.log2_rem[token + q] = log2_of(sticks.length[q]);
    head.stop[token + q] = static_cast<int32_t>(stop);
    float* row = head.o.row(token + q);
    std::copy_n(o + q * head.d, head.d, row);
    if (head.params.remainder == Remainder::kNone) continue;
    const float* r = head.bias ? head.bias : head.v.row(token + q);
    for (int64_t c = 0; c < head.d; ++c) row[c] += rem * r[c];
  }
}

template <bool kGated>
void forward_tile(const QueryTile& tile, const Head& head, const ForwardScratch& m) {
  const int64_t d = head.d;
  const int64_t start = tile.document.begin;
  m.load(tile, head, head.params.scale);

  Sticks sticks;
  int64_t end = keys_end(tile);
  while (end > 0) {
    const int64_t begin = chunk_begin(end, 0);
    const int64_t keys = end - begin;
    pack(m.rows, head.k.from(start + begin, 0), keys, keys, d, 1.0f);
    score(m.z, m.rows, m.q_t, keys, d);
    break_sticks<kGated, false>(sticks, m.z, tile, begin, keys, head, nullptr, nullptr);
    pack(m.rows, head.v.from(start + begin, 0), keys, keys, d, 1.0f);
    mix(m.o, m.z, m.rows, keys, d);
    end = begin;
    if (sticks.all_below(head.params.skip_epsilon)) break;
  }
  finish_tile(tile, head, sticks, m.o, end);
}

// sigma and 1 - sigma from break_stick's code: +sigma for z <= 0, -(1 - sigma) for z > 0.
struct Sigma {
  float value;
  float complement;
};
inline Sigma decode_sigma(float code) {
  const bool positive = code < 0.0f;
  return {positive ? 1.0f + code : code, positive ? -code : 1.0f - code};
}

// One key against the 64 queries of a tile: `a` holds do.v and becomes dz; returns dgate.
template <bool kGated>
float break_stick_backward(float* __restrict a, float* __restrict w, const float* __restrict drem,
                           const float* __restrict stick_before, const float* __restrict sigma_code,
                           float gate) {
  float dgate = 0.0f;
#pragma omp simd reduction(+ : dgate)
  for (int64_t q = 0; q < kTile; ++q) {
    const Sigma sigma = decode_sigma(sigma_code[q]);
    const float difference = (a[q] - drem[q]) - w[q];
    const float dbeta = stick_before[q] * difference;
    const float beta = kGated ? gate * sigma.value : sigma.value;
    if constexpr (kGated) dgate += dbeta * sigma.value;
    a[q] = dbeta * beta * sigma.complement;
    w[q] += beta * difference;
  }
  return dgate;
}

struct StickScratch : BackwardScratch {
  static int64_t floats(int64_t head_dim, int64_t max_seqlen) {
    return BackwardScratch::floats(head_dim) + (kChunk + 2 * max_seqlen) * kTile;
  }
  StickScratch(Scratch scratch, int64_t head_dim, int64_t max_seqlen)
      : BackwardScratch(scratch, head_dim),
        chunk(scratch.take(kChunk * kTile)),
        stick_before(scratch.take(max_seqlen * kTile)),
        sigma_code(scratch.take(max_seqlen * kTile)) {}
  float* chunk;                      // [kChunk, kTile]
  float *stick_before, *sigma_code;  // [keys, kTile]
  alignas(64) std::array<float, kTile> drem{};
};

float dot(const float* x, const float* y, int64_t count) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) sum += x[i] * y[i];
  return sum;
}

// drem of each query, and the part of dv that comes from the remainder.
void backward_remainder(const QueryTile& tile, const Head& head, StickScratch& m) {
  const int64_t token = tile.document.begin + tile.first;
  m.drem.fill(0.0f);
  if (head.drem) std::copy_n(head.drem + token, tile.count, m.drem.begin());
  if (head.params.remainder == Remainder::kNone) return;
  for (int64_t q = 0; q < tile.count; ++q) {
    const float* dout = m.dout + q * head.d;
    const float* r = head.bias ? head.bias : head.v.row(token + q);
    m.drem[q] += dot(dout, r, head.d);
    if (head.bias) continue;
    float* dv = head.dv.row(token + q);
    const float rem = std::exp2(head.log2_rem[token + q]);
    for (int64_t c = 0; c < head.d; ++c) dv[c] += rem * dout[c];
  }
}

// Pass 1, right to left: sticks and sigmas, and dv.
template <bool kGated>
void backward_sticks(const QueryTile& tile, const Head& head, StickScratch& m, int64_t stop) {
  Sticks sticks;
  int64_t end = keys_end(tile);
  while (end > stop) {
    const int64_t begin = chunk_begin(end, stop);
    const int64_t keys = end - begin;
    const int64_t token = tile.document.begin + begin;
    pack(m.rows, head.k.from(token, 0), keys, keys, head.d, 1.0f);
    score(m.chunk, m.rows, m.q_t, keys, head.d);
    break_sticks<kGated, true>(sticks, m.chunk, tile, begin, keys, head,
                               m.stick_before + (begin - stop) * kTile,
                               m.sigma_code + (begin - stop) * kTile);
    scatter(head.dv.from(token, 0), m.chunk, m.dout, keys, head.d);
    end = begin;
  }
}

// Pass 2, left to right: dz, and from it dq, dk and dgate.
template <bool kGated>
void backward_logits(const QueryTile& tile, const Head& head, StickScratch& m, int64_t stop) {
  alignas(64) std::array<float, kTile> w{};
  const int64_t end = keys_end(tile);
  for (int64_t begin = stop; begin < end; begin += kChunk) {
    const int64_t keys = std::min(kChunk, end - begin);
    const int64_t token = tile.document.begin + begin;
    pack(m.rows, head.v.from(token, 0), keys, keys, head.d, 1.0f);
    score(m.chunk, m.rows, m.dout_t, keys, head.d);
    for (int64_t i = 0; i < keys; ++i) {
      const int64_t saved = (begin - stop + i) * kTile;
      const float gate = kGated ? *head.gate.row(token + i) : 1.0f;
      const float dgate =
          break_stick_backward<kGated>(m.chunk + i * kTile, w.data(), m.drem.data(),
                                       m.stick_before + saved, m.sigma_code + saved, gate);
      if constexpr (kGated) *head.dgate.row(token + i) += dgate;
    }
    scatter(head.dk.from(token, 0), m.chunk, m.q, keys, head.d);
    pack(m.rows, head.k.from(token, 0), keys, keys, head.d, head.params.scale);
    mix(m.dq, m.chunk, m.rows, keys, head.d);
  }
}

template <bool kGated>
void backward_tile(const QueryTile& tile, const Head& head, StickScratch& m) {
  const int64_t token = tile.document.begin + tile.first;
  m.load(tile, head, head.params.scale);

  backward_remainder(tile, head, m);
  backward_sticks<kGated>(tile, head, m, head.stop[token]);
  backward_logits<kGated>(tile, head, m, head.stop[token]);

  for (int64_t q = 0; q < tile.count; ++q) {
    float* const dq = head.dq.row(token + q);
    for (int64_t c = 0; c < head.d; ++c) dq[c] = m.dq[q * head.d + c] * head.params.query_factor;
  }
}

void backward_head(const Document& document, const Head& head, StickScratch& memory) {
  if (head.gate) zero(head.dgate.from(document.begin, 0), document.length, 1);
  for (int64_t first = 0; first < document.length; first += kTile) {
    const QueryTile tile{document, first, std::min(kTile, document.length - first)};
    if (head.gate) {
      backward_tile<true>(tile, head, memory);
    } else {
      backward_tile<false>(tile, head, memory);
    }
  }
}

// Computes all of one group of heads in one document. Only this call writes its dk, dv and dgate,
// head after head and tile after tile, so that the sums have one order.
void backward_document(const Document& document, std::span<const Head> group, StickScratch memory) {
  const Head& first = group.front();
  zero(first.dk.from(document.begin, 0), document.length, first.d);
  zero(first.dv.from(document.begin, 0), document.length, first.d);
  for (const Head& head : group) backward_head(document, head, memory);
}

// dr_h += sum_j rem_j do_j.
void add_vector_gradient(float* dr, const float* log2_rem, const Matrix& dout, int64_t tokens,
                         int64_t d) {
  for (int64_t c = 0; c < d; ++c) {
    double sum = 0.0;
    for (int64_t j = 0; j < tokens; ++j) {
      sum += static_cast<double>(std::exp2(log2_rem[j])) * dout.row(j)[c];
    }
    dr[c] += static_cast<float>(sum);
  }
}

// ---- Keys of other ranks (ops/far_keys.h): a rectangle, in which every query sees every key.

struct FarHead : HeadMatrices {
  template <typename Op>
  FarHead(const Op& t, int64_t index)
      : HeadMatrices(t, index),
        params(t.params),
        keys(t.far.keys),
        before(Matrix(t.before_HT).row(index)),
        stop(t.stop_HT.i32() + index * t.stop_HT.row_stride) {
    const int64_t first = t.k_THd.rows() - keys;
    k = k.from(first, 0);
    v = v.from(first, 0);
    if (t.gate_TH.defined()) gate = Matrix(t.gate_TH).from(first, index);
    if constexpr (std::is_same_v<Op, StickBreakingFarBackward>) {
      dk = dk.from(first, 0);
      dv = dv.from(first, 0);
      if (gate) dgate = Matrix(t.dgate_TH).from(first, index);
      w = Matrix(t.w_HT).row(index);
    } else {
      log2_rem = Matrix(t.log2_rem_HT).row(index);
    }
  }
  // The sticks that a tile's queries bring to the range.
  Sticks sticks(const QueryTile& tile) const {
    Sticks left;
    for (int64_t q = 0; q < tile.count; ++q) {
      left.length[q] = std::exp2(static_cast<double>(before[tile.first + q]));
    }
    return left;
  }

  StickBreakingParams params;
  int64_t keys;
  Matrix gate, dgate;         // [keys, 1], if there is one
  const float* before;        // [T]
  int32_t* stop;              // [T]
  float* log2_rem = nullptr;  // [T], forward
  float* w = nullptr;         // [T], backward
};

template <bool kGated>
void far_forward_tile(const QueryTile& tile, const FarHead& head, const ForwardScratch& m) {
  m.load(tile, head, head.params.scale);
  Sticks sticks = head.sticks(tile);
  int64_t end = head.keys;
  while (end > 0 && !sticks.all_below(head.params.skip_epsilon)) {
    const int64_t begin = std::max<int64_t>(0, end - kChunk);
    const int64_t keys = end - begin;
    pack(m.rows, head.k.from(begin, 0), keys, keys, head.d, 1.0f);
    score(m.z, m.rows, m.q_t, keys, head.d);
    for (int64_t i = keys - 1; i >= 0; --i) {
      const float gate = kGated ? *head.gate.row(begin + i) : 1.0f;
      break_stick<kGated, false>(m.z + i * kTile, sticks.length.data(), gate, nullptr, nullptr);
    }
    pack(m.rows, head.v.from(begin, 0), keys, keys, head.d, 1.0f);
    mix(m.o, m.z, m.rows, keys, head.d);
    end = begin;
  }
  for (int64_t q = 0; q < tile.count; ++q) {
    const int64_t token = tile.first + q;
    head.log2_rem[token] = log2_of(sticks.length[q]);
    head.stop[token] = static_cast<int32_t>(end);
    float* row = head.o.row(token);
    for (int64_t c = 0; c < head.d; ++c) row[c] += m.o[q * head.d + c];
  }
}

// The same two passes as backward_sticks and backward_logits; W enters at the left edge, and leaves
// at the right one.
template <bool kGated>
void far_backward_tile(const QueryTile& tile, const FarHead& head, StickScratch& m) {
  m.load(tile, head, head.params.scale);
  Sticks sticks = head.sticks(tile);
  const int64_t stop = head.stop[tile.first];
  for (int64_t end = head.keys; end > stop;) {
    const int64_t begin = std::max(stop, end - kChunk);
    const int64_t keys = end - begin;
    pack(m.rows, head.k.from(begin, 0), keys, keys, head.d, 1.0f);
    score(m.chunk, m.rows, m.q_t, keys, head.d);
    for (int64_t i = keys - 1; i >= 0; --i) {
      const int64_t saved = (begin - stop + i) * kTile;
      const float gate = kGated ? *head.gate.row(begin + i) : 1.0f;
      break_stick<kGated, true>(m.chunk + i * kTile, sticks.length.data(), gate,
                                m.stick_before + saved, m.sigma_code + saved);
    }
    scatter(head.dv.from(begin, 0), m.chunk, m.dout, keys, head.d);
    end = begin;
  }
  alignas(64) std::array<float, kTile> w{};
  std::copy_n(head.w + tile.first, tile.count, w.begin());
  for (int64_t begin = stop; begin < head.keys; begin += kChunk) {
    const int64_t keys = std::min(kChunk, head.keys - begin);
    pack(m.rows, head.v.from(begin, 0), keys, keys, head.d, 1.0f);
    score(m.chunk, m.rows, m.dout_t, keys, head.d);
    for (int64_t i = 0; i < keys; ++i) {
      const int64_t saved = (begin - stop + i) * kTile;
      const float gate = kGated ? *head.gate.row(begin + i) : 1.0f;
      const float dgate =
          break_stick_backward<kGated>(m.chunk + i * kTile, w.data(), m.drem.data(),
                                       m.stick_before + saved, m.sigma_code + saved, gate);
      if constexpr (kGated) *head.dgate.row(begin + i) += dgate;
    }
    scatter(head.dk.from(begin, 0), m.chunk, m.q, keys, head.d);
    pack(m.rows, head.k.from(begin, 0), keys, keys, head.d, head.params.scale);
    mix(m.dq, m.chunk, m.rows, keys, head.d);
  }
  std::copy_n(w.begin(), tile.count, head.w + tile.first);
  for (int64_t q = 0; q < tile.count; ++q) {
    float* const dq = head.dq.row(tile.first + q);
    for (int64_t c = 0; c < head.d; ++c) dq[c] += m.dq[q * head.d + c] * head.params.query_factor;
  }
}

// What receives the remainder of one head: the token's value, or the head's vector.
struct Receiver {
  template <typename Op>
  Receiver(const Op& t, int64_t index, int64_t d)
      : rows(t.params.remainder == Remainder::kBias
                 ? Matrix{t.remainder_bias_Hd.f32() + index * d, 0}
                 : Matrix(t.v_THd).from(0, index / (t.params.heads * d / t.v_THd.cols()) * d)) {}
  const float* row(int64_t token) const { return rows.row(token); }
  Matrix rows;
};

// The tiles of the queries that see the keys.
std::vector<QueryTile> far_tiles(const FarKeys& far) {
  std::vector<QueryTile> tiles;
  if (far.keys == 0) return tiles;
  for (int64_t first = 0; first < far.queries; first += kTile) {
    tiles.push_back({{0, far.queries}, first, std::min(kTile, far.queries - first)});
  }
  return tiles;
}

// logits become the sigma code of break_stick.
void encode_sigma(float* z) {
#pragma omp simd
  for (int64_t i = 0; i < kTile; ++i) {
    const float magnitude = simd::abs(z[i]);
    const float e = simd::exp(magnitude < kLargestLogit ? -magnitude : -kLargestLogit);
    const float small = e / (1.0f + e);
    z[i] = z[i] > 0.0f ? -small : small;
  }
}

// One head of keys of one sequence, whose rows lie in pages.
struct PagedHead {
  PagedHead(const StickBreakingKeptDecode& t, int64_t sequence, int64_t head)
      : index(head),
        d(t.q_BHd.cols() / t.params.heads),
        group(t.params.heads / t.pages_BGM.shape[1]),
        key_head(head / group),
        length(t.lengths_BG.i32()[sequence * t.pages_BGM.shape[1] + key_head]),
        q(Matrix(t.q_BHd).from(sequence, head * d).data),
        o(Matrix(t.o_BHd).from(sequence, head * d).data),
        own_k(Matrix(t.k_BGd).from(sequence, key_head * d).data),
        own_v(Matrix(t.v_BGd).from(sequence, key_head * d).data),
        pages(key_pages(t.pages_BGM).of_head(sequence, key_head)) {
    require(length > 0 && length <= t.capacity(), "sequence {} keeps {} keys in pages for {}",
            sequence, length, t.capacity());
  }
  float* page(int64_t i) const {
    return reinterpret_cast<float*>(pages[i / kPageKeys]);  // NOLINT: pages are given as addresses
  }
  float* k_row(int64_t i) const { return page(i) + i % kPageKeys * d; }
  float* v_row(int64_t i) const { return k_row(i) + kPageKeys * d; }
  // Of heads of keys, the first head of queries writes the token's own row.
  void append() const {
    if (index % group != 0) return;
    std::copy_n(own_k, d, k_row(length - 1));
    std::copy_n(own_v, d, v_row(length - 1));
  }

  double gate_of(int64_t i) const {
    return (page(i) + 2 * kPageKeys * d)[i % kPageKeys * group + index % group];
  }
  const float* own_value() const { return own_v; }
  // Rows are copied to neighbouring ones, so that the arithmetic is that of a cache without pages.
  void logits(float* z, int64_t begin, int64_t keys, float scale) const {
    for (int64_t i = 0; i < keys; ++i) std::copy_n(k_row(begin + i), d, tile + i * d);
    skinny_gemm(1, keys, d, scale, q, d, tile, d, false, z, keys);
  }
  void add_values(float* y, int64_t begin, int64_t keys, const float* weights) const {
    for (int64_t i = 0; i < keys; ++i) std::copy_n(v_row(begin + i), d, tile + i * d);
    cpu::add_values(y, {tile, d}, d, keys, weights);
  }
  int64_t index;  // of the head of queries
  int64_t d;
  int64_t group, key_head;
  int64_t length;  // number of keys, the new token's included
  const float* q;
  float* o;
  const float *own_k, *own_v;
  const int64_t* pages;
  float* tile = nullptr;  // [kTile, d], the thread's
};

// Computes one head of the new token of one sequence against its cache, from right to left.
template <typename Op, typename Head>
void decode_head(const Op& t, const Head& cached) {
  const StickBreakingParams& params = t.params;
  float* o = cached.o;
  std::fill_n(o, cached.d, 0.0f);
  double stick = 1.0;
  alignas(64) std::array<float, kTile> code{};
  std::array<float, kTile> weights{};
  int64_t end = params.attend_current ? cached.length : cached.length - 1;
  while (end > 0 && !(stick < params.skip_epsilon)) {
    const int64_t begin = std::max<int64_t>(0, end - kTile);
    cached.logits(code.data(), begin, end - begin, params.scale);
    encode_sigma(code.data());
    for (int64_t i = end - 1; i >= begin; --i) {
      const Sigma sigma = decode_sigma(code[i - begin]);
      const double gate = cached.gate_of(i);
      const double beta = gate * sigma.value;
      weights[i - begin] = static_cast<float>(beta * stick);
      // 1 - sigma from the code: decode_sigma rounds one of the two to fp32.
      const double complement = sigma.value > 0.5f ? sigma.complement : 1.0 - sigma.value;
      stick *= (1.0 - gate) + gate * complement;
    }
    cached.add_values(o, begin, end - begin, weights.data());
    end = begin;
  }
  if (params.remainder == Remainder::kNone) return;
  const float* r = params.remainder == Remainder::kBias
                       ? t.remainder_bias_Hd.f32() + cached.index * cached.d
                       : cached.own_value();
  for (int64_t c = 0; c < cached.d; ++c) o[c] += static_cast<float>(stick) * r[c];
}

}  // namespace

Buffer scratch(const Stream& s, const StickBreakingForward& op) {
  return thread_scratch(s, "stickbreaking forward", ForwardScratch::floats(head_dim(op)));
}

Buffer scratch(const Stream& s, const StickBreakingBackward& op) {
  return thread_scratch(s, "stickbreaking backward",
                        StickScratch::floats(head_dim(op), op.sequences.max_seqlen));
}

void run(Cpu, Stream& /*s*/, const StickBreakingForward& t, const Buffer& scratch) {
  const auto heads = make_heads<Head>(t);
  for_each_head(query_tiles_by_keys(t.sequences, t.q_THd.rows()), heads,
                [&](const QueryTile& tile, const Head& head) {
                  const ForwardScratch m{Scratch(scratch), head.d};
                  if (head.gate) {
                    forward_tile<true>(tile, head, m);
                  } else {
                    forward_tile<false>(tile, head, m);
                  }
                });
}

void run(Cpu, Stream& /*s*/, const StickBreakingBackward& t, const Buffer& scratch) {
  const auto heads = make_heads<Head>(t);
  const int64_t max_seqlen = t.sequences.max_seqlen;
  for_each_group(
      documents_by_length(t.sequences, t.q_THd.rows()), std::span(heads),
      queries_of_key(t.q_THd, t.k_THd), [&](const Document& document, std::span<const Head> group) {
        backward_document(document, group, {Scratch(scratch), group.front().d, max_seqlen});
      });
  if (t.params.remainder != Remainder::kBias) return;
#pragma omp parallel for
  for (int64_t h = 0; h < t.params.heads; ++h) {
    const Head& head = heads[h];
    add_vector_gradient(head.dbias, head.log2_rem, head.dout, t.q_THd.rows(), head.d);
  }
}

Buffer scratch(const Stream& s, const StickBreakingFarForward& op) {
  return thread_scratch(s, "stickbreaking far forward", ForwardScratch::floats(head_dim(op)));
}

Buffer scratch(const Stream& s, const StickBreakingFarBackward& op) {
  return thread_scratch(s, "stickbreaking far backward",
                        StickScratch::floats(head_dim(op), op.k_THd.rows()));
}

void run(Cpu, Stream& /*s*/, const StickBreakingFarForward& t, const Buffer& scratch) {
  const auto heads = make_heads<FarHead>(t);
  for_each_head(far_tiles(t.far), heads, [&](const QueryTile& tile, const FarHead& head) {
    const ForwardScratch m{Scratch(scratch), head.d};
    head.gate ? far_forward_tile<true>(tile, head, m) : far_forward_tile<false>(tile, head, m);
  });
}

// One thread adds to the dk, dv and dgate of a group, tile after tile of head after head.
void run(Cpu, Stream& /*s*/, const StickBreakingFarBackward& t, const Buffer& scratch) {
  const auto heads = make_heads<FarHead>(t);
  const std::vector<QueryTile> tiles = far_tiles(t.far);
  const std::vector<Document> whole(tiles.empty() ? 0 : 1);
  for_each_group(whole, std::span(heads), queries_of_key(t.q_THd, t.k_THd),
                 [&](const Document&, std::span<const FarHead> group) {
                   StickScratch m(Scratch(scratch), group.front().d, t.k_THd.rows());
                   for (const FarHead& head : group) {
                     for (const QueryTile& tile : tiles) {
                       head.gate ? far_backward_tile<true>(tile, head, m)
                                 : far_backward_tile<false>(tile, head, m);
                     }
                   }
                 });
}

void run(Cpu, Stream& /*s*/, const AddRemainder& t) {
  const int64_t d = t.o_THd.cols() / t.params.heads;
#pragma omp parallel for
  for (int64_t h = 0; h < t.params.heads; ++h) {
    const Receiver receiver(t, h, d);
    const Matrix o = Matrix(t.o_THd).from(0, h * d);
    const float* log2_rem = Matrix(t.log2_rem_HT).row(h);
    for (int64_t j = 0; j < t.o_THd.rows(); ++j) {
      const float rem = std::exp2(log2_rem[j]);
      const float* x = receiver.row(j);
      for (int64_t c = 0; c < d; ++c) o.row(j)[c] += rem * x[c];
    }
  }
}

void run(Cpu, Stream& /*s*/, const RemainderGradient& t) {
  const int64_t d = t.do_THd.cols() / t.params.heads;
#pragma omp parallel for
  for (int64_t h = 0; h < t.params.heads; ++h) {
    const Receiver receiver(t, h, d);
    const Matrix dout = Matrix(t.do_THd).from(0, h * d);
    float* w = Matrix(t.w_HT).row(h);
    for (int64_t j = 0; j < t.do_THd.rows(); ++j) w[j] = dot(dout.row(j), receiver.row(j), d);
  }
}

// One thread adds to a head of values, or of vectors, from one head of queries after the other.
void run(Cpu, Stream& /*s*/, const AddRemainderBackward& t, const Buffer& /*scratch*/) {
  const int64_t tokens = t.do_THd.rows(), d = t.do_THd.cols() / t.params.heads;
  const bool to_vector = t.params.remainder == Remainder::kBias;
  const int64_t group = to_vector ? 1 : t.do_THd.cols() / t.dv_THd.cols();
#pragma omp parallel for
  for (int64_t first = 0; first < t.params.heads; first += group) {
    for (int64_t h = first; h < first + group; ++h) {
      const float* log2_rem = Matrix(t.log2_rem_HT).row(h);
      const Matrix dout = Matrix(t.do_THd).from(0, h * d);
      if (to_vector) {
        add_vector_gradient(t.dremainder_bias_Hd.f32() + h * d, log2_rem, dout, tokens, d);
        continue;
      }
      const Matrix dv = Matrix(t.dv_THd).from(0, h / group * d);
      for (int64_t j = 0; j < tokens; ++j) {
        const float rem = std::exp2(log2_rem[j]);
        for (int64_t c = 0; c < d; ++c) dv.row(j)[c] += rem * dout.row(j)[c];
      }
    }
  }
}

void run(Cpu, Stream& /*s*/, const StickBreakingDecode& t, const Buffer& /*scratch*/) {
  append_own(t);
  const std::vector<CachedHead> cached = make_cached_heads(t);
  for_each_cached_head(cached, [&](const CachedHead& head) { decode_head(t, head); });
}

Buffer scratch(const Stream& s, const StickBreakingKeptDecode& op) {
  return thread_scratch(s, "keys of a page", kTile * (op.q_BHd.cols() / op.params.heads));
}

void run(Cpu, Stream& /*s*/, const StickBreakingKeptDecode& t, const Buffer& scratch) {
  std::vector<PagedHead> heads;
  for (int64_t b = 0; b < t.q_BHd.rows(); ++b) {
    for (int64_t h = 0; h < t.params.heads; ++h) heads.emplace_back(t, b, h).append();
  }
  for_each_cached_head(heads, [&](PagedHead head) {
    head.tile = Scratch(scratch).take(kTile * head.d);
    decode_head(t, head);
  });
}

}  // namespace sbtrain::ops::cpu
