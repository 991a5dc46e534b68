// Stick-breaking attention on the CPU (arXiv 2410.17980, equations 1-4).
//
// For one query j, going over its keys from the nearest to the farthest, T is what is left of the
// stick: T = 1 at first, then for each key A = beta T and T <- T (1 - beta). After the last key
// rem = T. In this product form a key costs one exponential, and nothing can overflow.
//
// Backward. Let a_i = do.v_i - drem and T_i the stick left before key i. Take W_i = sum_{i'<i}
// A_i' a_i' / (T_i (1 - beta_i)), the mean of a over what a fresh stick would give to the keys left
// of i. Then
//   dL/dbeta_i = T_i (a_i - W_i),    W_{i+1} = W_i + beta_i (a_i - W_i),    W_first = 0,
// which equals the paper's dz_i = g_i - beta_i sum_{i'<=i} g_i' (g = A a, its printed upper limit
// j-1 is a typo), but divides by nothing and adds convex combinations only: it stays exact when
// beta saturates, with a forget gate too. T runs from right to left and W from left to right, so
// a query tile makes two passes and keeps T and sigma of all its keys in scratch.
#include <array>
#include <cmath>

#include "ops/cpu/attention.h"
#include "ops/cpu/attention_tile.h"
#include "ops/cpu/simd.h"

namespace sbtrain::ops::cpu {
namespace {

// A stick shorter than this is gone: keeps subnormal numbers, which are slow, out of the products.
constexpr double kShortestStick = 0x1p-80;
// Logits are cut here. exp(-80) is far below any sum it could enter and still a normal number.
constexpr float kLargestLogit = 80.0f;

// One key against the 64 queries of a tile. `z` holds the logits and becomes A.
// sigma(z) and 1 - sigma(z) both come from exp(-|z|), so neither suffers cancellation, and the
// stick is kept in fp64: thousands of tiny betas would vanish against 1 in fp32.
// With kSave, what the backward pass needs: the stick before this key, and sigma (see Sigma).
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

// Which query of the tile sees key `key` first, going left: its stick is whole there.
int64_t starting_lane(const QueryTile& tile, int64_t key, bool attend_current) {
  return key - tile.first + (attend_current ? 0 : 1);
}

struct Head {
  const StickBreakingParams& params;
  int64_t index;
  int64_t head_dim;
};

// The state of one query tile on its way over the keys.
struct Sticks {
  alignas(64) std::array<double, kTile> length{};  // 0 until the query's first key is reached
  float longest() const {
    double longest = 0;
    for (const double l : length) longest = std::max(longest, l);
    return static_cast<float>(longest);
  }
};

// Keys [begin, begin + keys) of the tile's document, from right to left: logits `z` become A.
// `stick_before` and `sigma_code` are written if given.
template <bool kGated, bool kSave>
void break_sticks(Sticks& sticks, float* z, const QueryTile& tile, int64_t begin, int64_t keys,
                  const Tensor& gate_TH, const Head& head, float* stick_before, float* sigma_code) {
  for (int64_t i = keys - 1; i >= 0; --i) {
    const int64_t lane = starting_lane(tile, begin + i, head.params.attend_current);
    if (lane >= 0 && lane < tile.count) sticks.length[lane] = 1.0;
    float gate = 1.0f;
    if constexpr (kGated) {
      const int64_t token = tile.document.begin + begin + i;
      gate = gate_TH.f32()[token * gate_TH.row_stride + head.index];
    }
    float* before = kSave ? stick_before + i * kTile : nullptr;
    float* sigma = kSave ? sigma_code + i * kTile : nullptr;
    break_stick<kGated, kSave>(z + i * kTile, sticks.length.data(), gate, before, sigma);
  }
  // The first token of a document sees no key: all of its stick remains.
  if (begin == 0 && tile.first == 0 && !head.params.attend_current) sticks.length[0] = 1.0;
}

template <bool kSave>
void break_sticks(Sticks& sticks, float* z, const QueryTile& tile, int64_t begin, int64_t keys,
                  const Tensor& gate_TH, const Head& head, float* stick_before = nullptr,
                  float* sigma_code = nullptr) {
  if (gate_TH.defined()) {
    break_sticks<true, kSave>(sticks, z, tile, begin, keys, gate_TH, head, stick_before,
                              sigma_code);
  } else {
    break_sticks<false, kSave>(sticks, z, tile, begin, keys, gate_TH, head, stick_before,
                               sigma_code);
  }
}

int64_t keys_end(const QueryTile& tile) {
  return tile.first + tile.count;
}

// Where the chunk that ends at `end` begins, not left of `stop`.
int64_t chunk_begin(int64_t end, int64_t stop) {
  return std::max(stop, end - kChunk);
}

// Adds the remainder and writes the tile's output, rem and stop.
void finish_tile(const StickBreakingForward& t, const QueryTile& tile, const Head& head,
                 const Sticks& sticks, const float* o, int64_t stop) {
  const int64_t token = tile.document.begin + tile.first;
  const HeadRows out = head_rows(t.o_THd, head.index, head.head_dim, token);
  const HeadRows v = head_rows(t.v_THd, head.index, head.head_dim, token);
  float* rem = t.rem_HT.f32() + head.index * t.rem_HT.row_stride + token;
  int32_t* stops = t.stop_HT.i32() + head.index * t.stop_HT.row_stride + token;
  for (int64_t q = 0; q < tile.count; ++q) {
    rem[q] = static_cast<float>(sticks.length[q]);
    stops[q] = static_cast<int32_t>(stop);
    const float* r = nullptr;
    if (head.params.remainder == Remainder::kValue) r = v.data + q * v.stride;
    if (head.params.remainder == Remainder::kBias) {
      r = t.remainder_bias_Hd.f32() + head.index * head.head_dim;
    }
    float* row = out.data + q * out.stride;
    const float* mixed = o + q * head.head_dim;
    for (int64_t c = 0; c < head.head_dim; ++c) row[c] = r ? mixed[c] + rem[q] * r[c] : mixed[c];
  }
}

void forward_tile(const StickBreakingForward& t, const QueryTile& tile, const Head& head,
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

  Sticks sticks;
  int64_t end = keys_end(tile);
  while (end > 0) {
    const int64_t begin = chunk_begin(end, 0);
    const int64_t keys = end - begin;
    pack(rows, head_rows(t.k_THd, head.index, d, start + begin), keys, keys, d, 1.0f);
    score(z, rows, q_t, keys, d);
    break_sticks<false>(sticks, z, tile, begin, keys, t.gate_TH, head);
    pack(rows, head_rows(t.v_THd, head.index, d, start + begin), keys, keys, d, 1.0f);
    mix(o, z, rows, keys, d);
    end = begin;
    const bool all_started = begin < tile.first;
    if (all_started && sticks.longest() < head.params.skip_epsilon) break;
  }
  finish_tile(t, tile, head, sticks, o, end);
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

// One thread's memory for the backward pass of one query tile.
struct BackwardScratch {
  BackwardScratch(Scratch scratch, int64_t head_dim, int64_t max_seqlen)
      : q(scratch.take(kTile * head_dim)),
        q_t(scratch.take(kTile * head_dim)),
        dout(scratch.take(kTile * head_dim)),
        dout_t(scratch.take(kTile * head_dim)),
        dq(scratch.take(kTile * head_dim)),
        rows(scratch.take(kChunk * head_dim)),
        chunk(scratch.take(kChunk * kTile)),
        stick_before(scratch.take(max_seqlen * kTile)),
        sigma_code(scratch.take(max_seqlen * kTile)) {}
  float *q, *q_t, *dout, *dout_t, *dq, *rows, *chunk;
  float *stick_before, *sigma_code;  // [keys, kTile]
};

// The gradient of the remainder, and what the remainder alone adds to dv.
void backward_remainder(const StickBreakingBackward& t, const QueryTile& tile, const Head& head,
                        float* drem) {
  const int64_t d = head.head_dim;
  const int64_t token = tile.document.begin + tile.first;
  const HeadRows dout = head_rows(t.do_THd, head.index, d, token);
  std::fill(drem, drem + kTile, 0.0f);
  if (head.params.remainder == Remainder::kNone) return;
  const bool by_value = head.params.remainder == Remainder::kValue;
  const float* rem = t.rem_HT.f32() + head.index * t.rem_HT.row_stride + token;
  const HeadRows v = head_rows(t.v_THd, head.index, d, token);
  const HeadRows dv = head_rows(t.dv_THd, head.index, d, token);
  for (int64_t q = 0; q < tile.count; ++q) {
    const float* row = dout.data + q * dout.stride;
    const float* r = by_value ? v.data + q * v.stride : t.remainder_bias_Hd.f32() + head.index * d;
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < d; ++c) sum += row[c] * r[c];
    drem[q] = sum;
    if (by_value) {
      for (int64_t c = 0; c < d; ++c) dv.data[q * dv.stride + c] += rem[q] * row[c];
    }
  }
}

// Pass 1, right to left: sticks and sigmas, and dv.
void backward_sticks(const StickBreakingBackward& t, const QueryTile& tile, const Head& head,
                     const BackwardScratch& m, int64_t stop) {
  const int64_t d = head.head_dim;
  Sticks sticks;
  int64_t end = keys_end(tile);
  while (end > stop) {
    const int64_t begin = chunk_begin(end, stop);
    const int64_t keys = end - begin;
    const int64_t token = tile.document.begin + begin;
    pack(m.rows, head_rows(t.k_THd, head.index, d, token), keys, keys, d, 1.0f);
    score(m.chunk, m.rows, m.q_t, keys, d);
    break_sticks<true>(sticks, m.chunk, tile, begin, keys, t.gate_TH, head,
                       m.stick_before + (begin - stop) * kTile,
                       m.sigma_code + (begin - stop) * kTile);
    scatter(head_rows(t.dv_THd, head.index, d, token), m.chunk, m.dout, keys, d);
    end = begin;
  }
}

// Pass 2, left to right: dz, and from it dq, dk and dgate.
void backward_logits(const StickBreakingBackward& t, const QueryTile& tile, const Head& head,
                     const BackwardScratch& m, const float* drem, int64_t stop) {
  const int64_t d = head.head_dim;
  alignas(64) std::array<float, kTile> w{};
  const int64_t end = keys_end(tile);
  for (int64_t begin = stop; begin < end; begin += kChunk) {
    const int64_t keys = std::min(kChunk, end - begin);
    const int64_t token = tile.document.begin + begin;
    pack(m.rows, head_rows(t.v_THd, head.index, d, token), keys, keys, d, 1.0f);
    score(m.chunk, m.rows, m.dout_t, keys, d);
    for (int64_t i = 0; i < keys; ++i) {
      float* row = m.chunk + i * kTile;
      const float* before = m.stick_before + (begin - stop + i) * kTile;
      const float* code = m.sigma_code + (begin - stop + i) * kTile;
      if (t.gate_TH.defined()) {
        const float gate = t.gate_TH.f32()[(token + i) * t.gate_TH.row_stride + head.index];
        float& dgate = t.dgate_TH.f32()[(token + i) * t.dgate_TH.row_stride + head.index];
        dgate += break_stick_backward<true>(row, w.data(), drem, before, code, gate);
      } else {
        break_stick_backward<false>(row, w.data(), drem, before, code, 1.0f);
      }
    }
    scatter(head_rows(t.dk_THd, head.index, d, token), m.chunk, m.q, keys, d);
    pack(m.rows, head_rows(t.k_THd, head.index, d, token), keys, keys, d, head.params.scale);
    mix(m.dq, m.chunk, m.rows, keys, d);
  }
}

void backward_tile(const StickBreakingBackward& t, const QueryTile& tile, const Head& head,
                   const BackwardScratch& m) {
  const int64_t d = head.head_dim;
  const int64_t token = tile.document.begin + tile.first;
  const int64_t stop = t.stop_HT.i32()[head.index * t.stop_HT.row_stride + token];
  pack(m.q, head_rows(t.q_THd, head.index, d, token), tile.count, kTile, d, head.params.scale);
  transpose(m.q_t, m.q, d);
  pack(m.dout, head_rows(t.do_THd, head.index, d, token), tile.count, kTile, d, 1.0f);
  transpose(m.dout_t, m.dout, d);
  std::fill(m.dq, m.dq + kTile * d, 0.0f);
  alignas(64) std::array<float, kTile> drem{};

  backward_remainder(t, tile, head, drem.data());
  backward_sticks(t, tile, head, m, stop);
  backward_logits(t, tile, head, m, drem.data(), stop);

  const HeadRows dq = head_rows(t.dq_THd, head.index, d, token);
  for (int64_t q = 0; q < tile.count; ++q) {
    std::copy_n(m.dq + q * d, d, dq.data + q * dq.stride);
  }
}

// All of one head in one document: only this call touches its dk, dv and dgate, tile after tile,
// so the sums have one order.
void backward_document(const StickBreakingBackward& t, const Document& document, const Head& head,
                       const BackwardScratch& m) {
  zero_head(t.dk_THd, head.index, head.head_dim, document);
  zero_head(t.dv_THd, head.index, head.head_dim, document);
  if (t.gate_TH.defined()) zero_head(t.dgate_TH, head.index, 1, document);
  for (int64_t first = 0; first < document.length; first += kTile) {
    const QueryTile tile{document, first, std::min(kTile, document.length - first)};
    backward_tile(t, tile, head, m);
  }
}

// dr_h += sum_j rem_j do_j.
void backward_remainder_bias(const StickBreakingBackward& t, const Head& head) {
  const int64_t d = head.head_dim;
  const float* rem = t.rem_HT.f32() + head.index * t.rem_HT.row_stride;
  const HeadRows dout = head_rows(t.do_THd, head.index, d, 0);
  float* dr = t.dremainder_bias_Hd.f32() + head.index * d;
  for (int64_t c = 0; c < d; ++c) {
    double sum = 0.0;
    for (int64_t j = 0; j < t.do_THd.rows(); ++j) {
      sum += static_cast<double>(rem[j]) * dout.data[j * dout.stride + c];
    }
    dr[c] += static_cast<float>(sum);
  }
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

// One new token of one sequence and head against its cache, right to left.
void decode_head(const DecodeTensors& t, int64_t sequence, const Head& head) {
  const int64_t d = head.head_dim;
  const CachedHead cached(t, sequence, head.index, d);
  const Tensor& gates = t.gate_cache_BCH;
  float* o = t.o_BHd.f32() + sequence * t.o_BHd.row_stride + head.index * d;
  std::fill_n(o, d, 0.0f);
  double stick = 1.0;
  alignas(64) std::array<float, kTile> code{};
  int64_t end = head.params.attend_current ? cached.length : cached.length - 1;
  while (end > 0 && !(stick < head.params.skip_epsilon)) {
    const int64_t begin = std::max<int64_t>(0, end - kTile);
    cached.logits(code.data(), begin, end - begin, head.params.scale);
    encode_sigma(code.data());
    for (int64_t i = end - 1; i >= begin; --i) {
      const Sigma sigma = decode_sigma(code[i - begin]);
      float beta = sigma.value;
      double keep = sigma.value > 0.5f ? sigma.complement : 1.0 - sigma.value;
      if (gates.defined()) {
        const float gate =
            gates.f32()[sequence * gates.row_stride + i * gates.shape[2] + head.index];
        beta *= gate;
        keep = keep * gate + (1.0 - gate);
      }
      cached.add_value(o, i, beta * static_cast<float>(stick));
      stick = stick * keep < kShortestStick ? 0.0 : stick * keep;
    }
    end = begin;
  }
  if (head.params.remainder == Remainder::kNone) return;
  const auto rem = static_cast<float>(stick);
  if (head.params.remainder == Remainder::kValue) {
    cached.add_value(o, cached.length - 1, rem);
  } else {
    const float* r = t.remainder_bias_Hd.f32() + head.index * d;
    for (int64_t c = 0; c < d; ++c) o[c] += rem * r[c];
  }
}

}  // namespace

Buffer stickbreaking_forward_scratch(const Stream& s, int64_t head_dim) {
  return thread_scratch(s, "stickbreaking forward",
                        3 * kTile * head_dim + kChunk * head_dim + kChunk * kTile);
}

Buffer stickbreaking_backward_scratch(const Stream& s, int64_t head_dim, int64_t max_seqlen) {
  return thread_scratch(
      s, "stickbreaking backward",
      5 * kTile * head_dim + kChunk * head_dim + kChunk * kTile + 2 * max_seqlen * kTile);
}

void stickbreaking_forward(Stream& s, const StickBreakingForward& t, const Sequences& sequences,
                           const StickBreakingParams& params) {
  const std::vector<QueryTile> tiles = query_tiles_by_keys(sequences, t.q_THd.rows());
  const int64_t head_dim = t.q_THd.cols() / params.heads;
  const Buffer scratch = stickbreaking_forward_scratch(s, head_dim);
  const int64_t tasks = static_cast<int64_t>(tiles.size()) * params.heads;
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t task = 0; task < tasks; ++task) {
    const Head head{params, task % params.heads, head_dim};
    forward_tile(t, tiles[task / params.heads], head, Scratch(scratch));
  }
}

void stickbreaking_backward(Stream& s, const StickBreakingBackward& t, const Sequences& sequences,
                            const StickBreakingParams& params) {
  const std::vector<Document> documents = documents_by_length(sequences, t.q_THd.rows());
  const int64_t head_dim = t.q_THd.cols() / params.heads;
  const Buffer scratch = stickbreaking_backward_scratch(s, head_dim, sequences.max_seqlen);
  const int64_t tasks = static_cast<int64_t>(documents.size()) * params.heads;
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t task = 0; task < tasks; ++task) {
    const Head head{params, task % params.heads, head_dim};
    const BackwardScratch memory(Scratch(scratch), head_dim, sequences.max_seqlen);
    backward_document(t, documents[task / params.heads], head, memory);
  }
  if (params.remainder != Remainder::kBias) return;
#pragma omp parallel for
  for (int64_t h = 0; h < params.heads; ++h) backward_remainder_bias(t, {params, h, head_dim});
}

void stickbreaking_decode(Stream& s, const DecodeTensors& t, const StickBreakingParams& params) {
  const int64_t head_dim = t.q_BHd.cols() / params.heads;
  const int64_t tasks = t.q_BHd.rows() * params.heads;
#pragma omp parallel for
  for (int64_t task = 0; task < tasks; ++task) {
    decode_head(t, task / params.heads, {params, task % params.heads, head_dim});
  }
}

}  // namespace sbtrain::ops::cpu
