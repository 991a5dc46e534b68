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
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "ops/cpu/attention_tile.h"
#include "ops/cpu/simd.h"

namespace sbtrain::ops::cpu {

// A shorter stick counts as used up. This keeps subnormal numbers, which are slow, out of products.
inline constexpr double kShortestStick = 0x1p-80;
// Logits are clamped to this magnitude. exp(-80) is far below any sum it could enter and still a
// normal number.
inline constexpr float kLargestLogit = 80.0f;

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

// The state of one query tile while it walks over the keys.
struct Sticks {
  alignas(64) std::array<double, kTile> length{};  // 0 until the query's first key is reached
  bool all_below(float epsilon) const {
    return std::all_of(length.begin(), length.end(), [&](double l) { return l < epsilon; });
  }
};

// Clamped, so that it is finite.
inline float log2_of(double stick) {
  constexpr double kLeast = std::numeric_limits<double>::min();
  return static_cast<float>(std::log2(std::max(stick, kLeast)));
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

// Pass 2 of a tile, left to right over its keys [stop, end), of which the first of all is row
// `first`: dz, and from it dq, dk and dgate. W of the queries goes on from `w`.
template <bool kGated, typename Keys>
void backward_logits(const Keys& head, int64_t first, int64_t stop, int64_t end, float* w,
                     StickScratch& m) {
  for (int64_t begin = stop; begin < end; begin += kChunk) {
    const int64_t keys = std::min(kChunk, end - begin);
    const int64_t token = first + begin;
    pack(m.rows, head.v.from(token, 0), keys, keys, head.d, 1.0f);
    score(m.chunk, m.rows, m.dout_t, keys, head.d);
    for (int64_t i = 0; i < keys; ++i) {
      const int64_t saved = (begin - stop + i) * kTile;
      const float gate = kGated ? *head.gate.row(token + i) : 1.0f;
      const float dgate =
          break_stick_backward<kGated>(m.chunk + i * kTile, w, m.drem.data(),
                                       m.stick_before + saved, m.sigma_code + saved, gate);
      if constexpr (kGated) *head.dgate.row(token + i) += dgate;
    }
    scatter(head.dk.from(token, 0), m.chunk, m.q, keys, head.d);
    pack(m.rows, head.k.from(token, 0), keys, keys, head.d, head.params.scale);
    mix(m.dq, m.chunk, m.rows, keys, head.d);
  }
}

inline float dot(const float* x, const float* y, int64_t count) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) sum += x[i] * y[i];
  return sum;
}

// dr_h += sum_j rem_j do_j.
inline void add_vector_gradient(float* dr, const float* log2_rem, const Matrix& dout,
                                int64_t tokens, int64_t d) {
  for (int64_t c = 0; c < d; ++c) {
    double sum = 0.0;
    for (int64_t j = 0; j < tokens; ++j) {
      sum += static_cast<double>(std::exp2(log2_rem[j])) * dout.row(j)[c];
    }
    dr[c] += static_cast<float>(sum);
  }
}

}  // namespace sbtrain::ops::cpu
