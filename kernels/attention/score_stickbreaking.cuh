// The score of stick-breaking attention: a scan along the keys, in the registers of one warp or
// warpgroup.
//
// Key tiles lie in shared memory in a permuted order (key_of_row): then each lane of a quad holds
// kLaneKeys = kKeys / 4 consecutive keys of its rows, and the scan is serial in registers but for a
// few shuffles within the quad. The stick is kept as a product: with e = 2^(z log2 e) a key takes
// beta = e / (1 + e) of the stick and leaves 1 / (1 + e) of it.
//
// Scores are any fragment with of_row(i, t), element t of the lane's row i in the order of its
// columns, 8 c + 2 (lane % 4) + b for t = 2 c + b, as mma.sync and wgmma lay out accumulators. What
// a row sees is any type with range(i) and all(begin, keys), see RowKeys in visibility.cuh.
#pragma once

#include "kernels/primitives/lanes.cuh"
#include "kernels/primitives/math.cuh"

namespace sbtrain::kernels {

// e is clamped to 2^31, so that the product of four (1 + e) is finite. A key thus leaves at least
// about 2^-31 of the stick.
inline constexpr float kLargestLogit = 31.0f;

// The key of a block of kKeys that lies in row `row` of its tile, and so in column `row` of the
// scores. Lane q of a quad holds columns 8c + 2q + b, b = 0, 1: its keys are q kKeys / 4 + 2c + b.
template <int kKeys>
__device__ __forceinline__ int key_of_row(int row) {
  return kKeys / 4 * (row % 8 / 2) + row / 8 * 2 + row % 2;
}

// Whether the warp's rows see all of these keys. It is a vote, so that the compiler knows that the
// lanes stay together: otherwise each exchange between them would first look for lanes that are
// elsewhere, and no instruction would move across it.
template <typename Seen>
__device__ __forceinline__ bool warp_sees_all(const Seen& seen, int begin, int keys) {
  return __all_sync(~0u, seen.all(begin, keys)) != 0;
}

// e of the lane's keys of row i of the scores; `first` is the lane's first key.
template <bool kMasked, int kLaneKeys, typename Scores, typename Seen>
__device__ __forceinline__ void exponentials(float (&e)[kLaneKeys], const Scores& s, int i,
                                             int first, float scale_log2, const Seen& seen) {
  // Counted from the lane's first key, so that each comparison is with a constant: the keys'
  // numbers would take a register each.
  const int begin = seen.range(i).begin - first, end = seen.range(i).end - first;
#pragma unroll
  for (int t = 0; t < kLaneKeys; ++t) {
    const float z = s.of_row(i, t) * scale_log2;
    e[t] = exp2_ftz(fminf(z, kLargestLogit));
    if (kMasked && (t < begin || t >= end)) e[t] = 0.0f;
  }
}

// (x[0] + x[1]) + (x[2] + x[3]) and so on.
template <int kCount>
__device__ __forceinline__ float pairwise_sum(const float* x) {
  if constexpr (kCount == 1) {
    return x[0];
  } else {
    constexpr int kHalf = kCount / 2;
    return pairwise_sum<kHalf>(x) + pairwise_sum<kCount - kHalf>(x + kHalf);
  }
}

template <int kCount>
__device__ __forceinline__ float pairwise_product(const float* x) {
  if constexpr (kCount == 1) {
    return x[0];
  } else {
    constexpr int kHalf = kCount / 2;
    return pairwise_product<kHalf>(x) * pairwise_product<kCount - kHalf>(x + kHalf);
  }
}

// log2 of `product`, that of the factors, each of them at least 2^-125. Its logarithm alone is
// enough unless the product comes near the smallest number.
template <int kCount>
__device__ __forceinline__ float log2_of_product(const float (&factors)[kCount], float product) {
  if (product >= 0x1p-100f) return log2_ftz(product);
  float sum = 0.0f;
#pragma unroll
  for (int n = 0; n < kCount; ++n) sum += log2_ftz(factors[n]);
  return sum;
}

// The sticks of a lane's kRows rows, broken from right to left, kKeys keys at a time.
template <int kRows, int kKeys, bool kGated>
struct Sticks {
  static constexpr int kLaneKeys = kKeys / 4;
  float left[kRows];       // T, the stick that is left: the same in all lanes of a quad
  float log2_left[kRows];  // the lane's part of log2 T

  __device__ __forceinline__ Sticks() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) left[i] = 1.0f, log2_left[i] = 0.0f;
  }

  // Scores of the keys from `block` on become A; `gates` are those of these keys.
  template <typename Scores, typename Seen>
  __device__ __forceinline__ void score(Scores& s, int block, float scale_log2, const Seen& seen,
                                        const float* gates) {
    const int first = block + kLaneKeys * quad_lane();
    const float* const lane_gates = gates + kLaneKeys * quad_lane();
    if (warp_sees_all(seen, block, kKeys)) {
      break_block<false>(s, first, scale_log2, seen, lane_gates);
    } else {
      break_block<true>(s, first, scale_log2, seen, lane_gates);
    }
  }

 private:
  // `first` is the lane's first key, `gates` those of its keys.
  template <bool kMasked, typename Scores, typename Seen>
  __device__ __forceinline__ void break_block(Scores& s, int first, float scale_log2,
                                              const Seen& seen, const float* gates) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float e[kLaneKeys];
      exponentials<kMasked>(e, s, i, first, scale_log2, seen);
      if constexpr (kGated) {
        break_row_gated(s, i, e, gates);
      } else {
        break_row(s, i, e);
      }
    }
  }

  // One reciprocal for four keys. With T_t the stick after key t: A_t = e_t T_t, and T_t of the
  // next key to the right is T_t + A_t.
  template <typename Scores>
  __device__ __forceinline__ void break_row(Scores& s, int i, const float (&e)[kLaneKeys]) {
    float after[kLaneKeys / 4];  // product of 1 / (1 + e) over four keys
#pragma unroll
    for (int g = 0; g < kLaneKeys / 4; ++g) {
      const float* x = e + 4 * g;
      const float left_of = 1.0f + x[0], right_of = 1.0f + x[2];
      after[g] = reciprocal_ftz(fmaf(x[1], left_of, left_of) * fmaf(x[3], right_of, right_of));
    }
    const float mine = pairwise_product<kLaneKeys / 4>(after);
    log2_left[i] += log2_of_product(after, mine);
    float stick = enter(i, mine);
#pragma unroll
    for (int g = kLaneKeys / 4 - 1; g >= 0; --g) {
      const float next = stick * after[g];
      stick = next;
#pragma unroll
      for (int t = 4 * g; t < 4 * g + 4; ++t) {
        const float a = e[t] * stick;
        s.of_row(i, t) = a;
        stick += a;
      }
      stick = next;
    }
  }

  template <typename Scores>
  __device__ __forceinline__ void break_row_gated(Scores& s, int i, const float (&e)[kLaneKeys],
                                                  const float* gates) {
    float beta[kLaneKeys], keep[kLaneKeys];
    float mine = 1.0f;
#pragma unroll
    for (int g = 0; g < kLaneKeys / 4; ++g) {
      float product = 1.0f;
#pragma unroll
      for (int t = 4 * g; t < 4 * g + 4; ++t) {
        const float r = reciprocal_ftz(1.0f + e[t]);
        const float f = gates[t];
        // A masked key has e = 0, r = 1: beta 0, keep 1.
        beta[t] = f * e[t] * r;
        keep[t] = fmaf(f, r, 1.0f - f);
        product *= keep[t];
      }
      log2_left[i] += log2_ftz(product);
      mine *= product;
    }
    float stick = enter(i, mine);
#pragma unroll
    for (int t = kLaneKeys - 1; t >= 0; --t) {
      s.of_row(i, t) = beta[t] * stick;
      stick *= keep[t];
    }
  }

  // Returns the stick before the lane's rightmost key, where the lane's keys leave `mine` of it,
  // and moves `left` to the end of the block.
  __device__ __forceinline__ float enter(int i, float mine) {
    const float right =
        from_right(mine, 1, 1.0f) * from_right(mine, 2, 1.0f) * from_right(mine, 3, 1.0f);
    const float before = left[i] * right;
    left[i] *= __shfl_sync(~0u, mine * right, 0, 4);
    return before;
  }
};

// The backward pass of a lane's kRows rows, from left to right. At the left edge of a block it
// needs log2 T of the stick that is left there, and C, the sum of g over the keys further left.
template <int kRows, int kKeys, bool kGated>
struct StickGradients {
  static constexpr int kLaneKeys = kKeys / 4;
  float log2_left[kRows];  // the same in all lanes of a quad, and C and drem too
  float c[kRows];
  float drem[kRows];

  // Scores become A and their gradients by A (dp = do.v) become dz, both of the keys from `block`
  // on; advances the state to the next block. dgate, with a gate: += of the lane's keys.
  template <typename Scores, typename Seen>
  __device__ __forceinline__ void score(Scores& s, Scores& dp, int block, float scale_log2,
                                        const Seen& seen, const float* gates, float* dgate) {
    const int first = block + kLaneKeys * quad_lane();
    const float* const lane_gates = gates + kLaneKeys * quad_lane();
    if (warp_sees_all(seen, block, kKeys)) {
      break_block<false>(s, dp, first, scale_log2, seen, lane_gates, dgate);
    } else {
      break_block<true>(s, dp, first, scale_log2, seen, lane_gates, dgate);
    }
  }

 private:
  // Keys go in groups of four: chains of dependent operations stay short, and the groups' run side
  // by side.
  static constexpr int kGroups = kLaneKeys / 4;

  template <bool kMasked, typename Scores, typename Seen>
  __device__ __forceinline__ void break_block(Scores& s, Scores& dp, int first, float scale_log2,
                                              const Seen& seen, const float* gates, float* dgate) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float e[kLaneKeys], r[kLaneKeys], kept[kGroups];
      exponentials<kMasked>(e, s, i, first, scale_log2, seen);
      float stick[kGroups], prefix[kGroups];
      enter(i, e, r, kept, stick, gates);
      break_groups(s, dp, i, e, r, kept, stick, prefix, gates);
      differentiate(dp, i, e, r, prefix, gates, dgate);
    }
  }

  // What four keys leave: the product of their r = 1 / (1 + e). One reciprocal serves all four.
  static __device__ __forceinline__ float keep_of_four(const float* e) {
    return reciprocal_ftz(((1.0f + e[0]) * (1.0f + e[1])) * ((1.0f + e[2]) * (1.0f + e[3])));
  }
  // r of each of them, from the product of all.
  static __device__ __forceinline__ void reciprocals(float* r, const float* e, float all) {
    const float u0 = 1.0f + e[0], u1 = 1.0f + e[1], u2 = 1.0f + e[2], u3 = 1.0f + e[3];
    const float of_low = all * (u2 * u3), of_high = all * (u0 * u1);
    r[0] = of_low * u1;
    r[1] = of_low * u0;
    r[2] = of_high * u3;
    r[3] = of_high * u2;
  }

  // The same with gates, and what each group leaves; returns log2 of what all keys leave.
  static __device__ __forceinline__ float keep_gated(const float (&e)[kLaneKeys],
                                                     float (&r)[kLaneKeys], float (&kept)[kGroups],
                                                     const float* gates) {
    float mine = 0.0f;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      float x[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int t = 4 * g + n;
        r[t] = reciprocal_ftz(1.0f + e[t]);
        x[n] = keep(r[t], gates, t);
      }
      kept[g] = (x[0] * x[1]) * (x[2] * x[3]);
      mine += log2_ftz(kept[g]);
    }
    return mine;
  }

  static __device__ __forceinline__ float keep(float r, const float* gates, int t) {
    return kGated ? fmaf(gates[t], r, 1.0f - gates[t]) : r;
  }

  // What each group of the lane's keys leaves, and the stick before each group's rightmost key;
  // with gates, r = 1 / (1 + e) too. Moves log2_left to the end of the block.
  __device__ __forceinline__ void enter(int i, const float (&e)[kLaneKeys], float (&r)[kLaneKeys],
                                        float (&kept)[kGroups], float (&stick)[kGroups],
                                        const float* gates) {
    float mine;  // log2 of what the lane's keys leave
    if constexpr (kGated) {
      mine = keep_gated(e, r, kept, gates);
    } else {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) kept[g] = keep_of_four(e + 4 * g);
      mine = log2_of_product(kept, pairwise_product<kGroups>(kept));
    }
    const float from_1 = from_left(mine, 1, 0.0f);
    const float from_2 = from_left(mine, 2, 0.0f);
    const float from_3 = from_left(mine, 3, 0.0f);
    const float after = log2_left[i] - (from_3 + from_2 + from_1 + mine);
    log2_left[i] = __shfl_sync(~0u, after, 3, 4);
    stick[kGroups - 1] = exp2_ftz(after);
#pragma unroll
    for (int g = kGroups - 1; g > 0; --g) stick[g - 1] = stick[g] * kept[g];
  }

  // Right to left: A, and g = A (dp - drem) in place of dp; e becomes sigma. prefix: the sum of g
  // left of each group. Without gates r is computed here, so that it lives within its group alone.
  template <typename Scores>
  __device__ __forceinline__ void break_groups(Scores& s, Scores& dp, int i, float (&e)[kLaneKeys],
                                               float (&r)[kLaneKeys], const float (&kept)[kGroups],
                                               float (&stick)[kGroups], float (&prefix)[kGroups],
                                               const float* gates) {
    float sums[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      sums[g] = 0.0f;
      if constexpr (!kGated) reciprocals(r + 4 * g, e + 4 * g, kept[g]);
#pragma unroll
      for (int t = 4 * g + 3; t >= 4 * g; --t) {
        float& score = s.of_row(i, t);
        float& gradient = dp.of_row(i, t);
        e[t] *= r[t];
        score = (kGated ? gates[t] * e[t] : e[t]) * stick[g];
        gradient = score * (gradient - drem[i]);
        sums[g] += gradient;
        stick[g] *= keep(r[t], gates, t);
      }
    }
    const float sum = pairwise_sum<kGroups>(sums);
    const float from_1 = from_left(sum, 1, 0.0f);
    const float from_2 = from_left(sum, 2, 0.0f);
    const float from_3 = from_left(sum, 3, 0.0f);
    prefix[0] = c[i] + (from_3 + from_2 + from_1);
    c[i] = __shfl_sync(~0u, prefix[0] + sum, 3, 4);
#pragma unroll
    for (int g = 1; g < kGroups; ++g) prefix[g] = prefix[g - 1] + sums[g - 1];
  }

  // Left to right: dz = g - beta C. With a gate, beta = f sigma: d beta = g / beta - C' / keep,
  // where C' is C without g.
  template <typename Scores>
  __device__ __forceinline__ void differentiate(Scores& dp, int i, const float (&sigma)[kLaneKeys],
                                                const float (&r)[kLaneKeys],
                                                float (&prefix)[kGroups], const float* gates,
                                                float* dgate) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int t = 4 * g; t < 4 * g + 4; ++t) {
        float& gradient = dp.of_row(i, t);
        const float mine = gradient;
        if constexpr (kGated) {
          const float by_keep = prefix[g] * reciprocal_ftz(keep(r[t], gates, t));
          gradient = (mine - gates[t] * sigma[t] * by_keep) * r[t];
          if (dgate) dgate[t] += (gates[t] > 0.0f ? mine / gates[t] : 0.0f) - sigma[t] * by_keep;
          prefix[g] += mine;
        } else {
          prefix[g] += mine;
          gradient = mine - sigma[t] * prefix[g];
        }
      }
    }
  }
};

}  // namespace sbtrain::kernels
