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

#include <type_traits>

#include "kernels/attention/visibility.cuh"
#include "kernels/primitives/lanes.cuh"
#include "kernels/primitives/math.cuh"

namespace sbtrain::kernels {

// e is clamped to 2^31, so that the product of four (1 + e) is finite. A key thus leaves at least
// about 2^-31 of the stick, and four keys 2^-124. What they leave of a short stick is a denormal
// number, from which T of the keys is multiplied up again: products keep such numbers (there is no
// -ftz=true), and what they lose is 2^-25 of a whole stick.
inline constexpr float kLargestLogit = 31.0f;
inline constexpr float kLargest = 0x1p31f;  // 2^kLargestLogit

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

// In place of scale * log2(e), where the queries have been multiplied by it.
struct UnitScale {
  __device__ __forceinline__ friend float operator*(float z, UnitScale) { return z; }
};

// e of the lane's keys of row i of the scores; `first` is the lane's first key.
template <bool kMasked, bool kClamped, int kLaneKeys, typename Scores, typename Scale,
          typename Seen>
__device__ __forceinline__ void exponentials(float (&e)[kLaneKeys], const Scores& s, int i,
                                             int first, Scale scale_log2, const Seen& seen) {
  // Counted from the lane's first key, so that each comparison is with a constant: the keys'
  // numbers would take a register each.
  const int begin = seen.range(i).begin - first, end = seen.range(i).end - first;
#pragma unroll
  for (int t = 0; t < kLaneKeys; ++t) {
    const float z = s.of_row(i, t) * scale_log2;
    e[t] = exp2_ftz(kClamped ? fminf(z, kLargestLogit) : z);
    if (kMasked && (t < begin || t >= end)) e[t] = 0.0f;
  }
}

// ---- Gates in the odds of a key ----
//
// With a gate f a key takes beta = f e / (1 + e) of the stick. What holds of e without gates, holds
// with them of the odds of that:
//   e' = beta / (1 - beta) = 1 / (1 / (f e) + (1 - f) / f).
// Then with y = g - e' C (StickGradients) the gradients are
//   d log f = y,  dz = y / (1 + e),  1 / (1 + e) = (1 - beta) - beta (1 - f) / f.

// Gates are taken for at least this, so that all numbers are finite.
inline constexpr float kSmallestGate = 0x1p-64f;

// What the scan needs of the gates of a block of 64 keys. [n][q] are the keys 16 q + 4 n to
// 16 q + 4 n + 3: what the lanes of a quad read together lies side by side.
struct alignas(16) KeyGates {
  float4 log2_inverse[4][4];  // log2(1 / f)
  float4 closed[4][4];        // (1 - f) / f
};
// The same of a block of kKeys, for the forward pass: [n][q] are the keys q kKeys / 4 + 4 n to
// q kKeys / 4 + 4 n + 3.
template <int kKeys>
struct alignas(16) ForwardGates {
  static constexpr int kLaneKeys = kKeys / 4;
  float4 log2[kKeys / 16][4];     // log2(f)
  float4 largest[kKeys / 16][4];  // log2 of f e, where e is as large as it may be
  float4 closed[kKeys / 16][4];   // (1 - f) / f

  __device__ __forceinline__ void set(int key, float gate) {
    const float f = fmaxf(gate, kSmallestGate);
    const float inverse = reciprocal_ftz(f), logarithm = log2_ftz(f);
    const int place = 4 * (key % kLaneKeys / 4 * 4 + key / kLaneKeys) + key % 4;
    reinterpret_cast<float*>(log2)[place] = logarithm;
    reinterpret_cast<float*>(largest)[place] = logarithm + kLargestLogit;
    reinterpret_cast<float*>(closed)[place] = (1.0f - f) * inverse;
  }
};

// The gates of a lane's keys, four at a time, in shared memory; or none.
struct LaneGates {
  static constexpr bool kAny = true;
  const KeyGates& keys;
  __device__ __forceinline__ float4 log2_inverse(int n) const {
    return keys.log2_inverse[n][quad_lane()];
  }
  __device__ __forceinline__ float4 closed(int n) const { return keys.closed[n][quad_lane()]; }
};
struct NoGates {
  static constexpr bool kAny = false;
};
// Element n of x, a constant.
__device__ __forceinline__ float element(const float4& x, int n) {
  return n == 0 ? x.x : n == 1 ? x.y : n == 2 ? x.z : x.w;
}

// e' of the lane's keys of row i of the scores. The clamp is that of e: where f e is as large, but
// e is not, or the other way round, 1 - f decides.
template <int kLaneKeys, typename Scores>
__device__ __forceinline__ void gated_odds(float (&e)[kLaneKeys], const Scores& s, int i,
                                           float scale_log2, const LaneGates& gates) {
#pragma unroll
  for (int g = 0; g < kLaneKeys / 4; ++g) {
    const float4 shift = gates.log2_inverse(g), closed = gates.closed(g);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float z = fmaf(s.of_row(i, 4 * g + n), -scale_log2, element(shift, n));
      e[4 * g + n] = reciprocal_ftz(exp2_ftz(fmaxf(z, -kLargestLogit)) + element(closed, n));
    }
  }
}

// With gates the scan has no registers for masks. So the scores of the lane's keys, from `first`
// on, that row i does not see become those of keys that take nothing.
template <int kLaneKeys, typename Scores>
__device__ __forceinline__ void hide_keys(Scores& s, int i, int first, KeyRange seen,
                                          float scale_log2) {
  asm volatile("");  // so that who sees all keys branches around this, and selects nothing
  const float nothing = copysignf(INFINITY, -scale_log2);
  const int begin = seen.begin - first, end = seen.end - first;
#pragma unroll
  for (int t = 0; t < kLaneKeys; ++t) {
    if (t < begin || t >= end) s.of_row(i, t) = nothing;
  }
}

// r = 1 / (1 + e) of keys 4 g to 4 g + 3 of a lane, from what they leave of the stick.
template <typename Gates>
struct Complements {
  __device__ __forceinline__ Complements(const Gates&, int) {}
  __device__ __forceinline__ float of(int, float kept) const { return kept; }
};
template <>
struct Complements<LaneGates> {
  __device__ __forceinline__ Complements(const LaneGates& gates, int g) : closed(gates.closed(g)) {}
  __device__ __forceinline__ float of(int n, float kept) const {
    return fmaf(kept - 1.0f, element(closed, n), kept);
  }
  float4 closed;
};

template <int kLaneKeys>
__device__ __forceinline__ void clamp(float (&e)[kLaneKeys]) {
#pragma unroll
  for (float& x : e) x = fminf(x, kLargest);
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

// Logarithms are taken of products down to this number, and of their factors below it.
inline constexpr float kSmallProduct = 0x1p-100f;

// The sticks of a lane's kRows rows, broken from right to left, kKeys keys at a time. With kGated
// each row goes by itself, which takes fewer registers; GatedSticks is faster.
template <int kRows, int kKeys, bool kGated>
struct Sticks {
  static constexpr int kLaneKeys = kKeys / 4;
  static constexpr int kGroups = kLaneKeys / 4;
  float left[kRows];       // T, the stick that is left: the same in all lanes of a quad
  float log2_left[kRows];  // the lane's part of log2 T

  __device__ __forceinline__ Sticks() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) left[i] = 1.0f, log2_left[i] = 0.0f;
  }

  // Scores of the keys from `block` on become A; `gates` are those of these keys.
  template <typename Scores, typename Seen, typename Scale>
  __device__ __forceinline__ void score(Scores& s, int block, Scale scale_log2, const Seen& seen,
                                        const float* gates) {
    const int first = block + kLaneKeys * quad_lane();
    const float* const lane_gates = gates + kLaneKeys * quad_lane();
    if (warp_sees_all(seen, block, kKeys)) {
      break_block<false>(s, first, scale_log2, seen, lane_gates);
    } else {
      break_block<true>(s, first, scale_log2, seen, lane_gates);
    }
  }

 protected:
  // The logarithm of a product is enough, unless the product comes near the smallest number. Each
  // factor is at least 2^-125.
  __device__ __forceinline__ void add_logarithms(const float (&after)[kRows][kGroups],
                                                 const float (&mine)[kRows], bool small) {
    if (!__any_sync(~0u, small)) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) log2_left[i] += log2_ftz(mine[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) log2_left[i] += log2_ftz(after[i][g]);
      }
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

 private:
  // `first` is the lane's first key, `gates` those of its keys.
  template <bool kMasked, typename Scores, typename Seen, typename Scale>
  __device__ __forceinline__ void break_block(Scores& s, int first, Scale scale_log2,
                                              const Seen& seen, const float* gates) {
    if constexpr (kGated) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        float e[kLaneKeys];
        exponentials<kMasked, true>(e, s, i, first, scale_log2, seen);
        break_row_gated(s, i, e, gates);
      }
    } else {
      break_rows<kMasked>(s, first, scale_log2, seen);
    }
  }

  // One reciprocal for four keys. With T_t the stick after key t: A_t = e_t T_t, and T_t of the
  // next key to the right is T_t + A_t. All rows go through each step together, because the steps
  // of one row depend on each other.
  template <bool kMasked, typename Scores, typename Seen, typename Scale>
  __device__ __forceinline__ void break_rows(Scores& s, int first, Scale scale_log2,
                                             const Seen& seen) {
    float e[kRows][kLaneKeys];
    float after[kRows][kGroups];  // product of 1 / (1 + e) over four keys
    float mine[kRows];            // over all of them
    bool small = false;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      exponentials<kMasked, true>(e[i], s, i, first, scale_log2, seen);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const float* x = e[i] + 4 * g;
        const float left_of = 1.0f + x[0], right_of = 1.0f + x[2];
        after[i][g] = reciprocal_ftz(fmaf(x[1], left_of, left_of) * fmaf(x[3], right_of, right_of));
      }
      mine[i] = pairwise_product<kGroups>(after[i]);
      small = small || mine[i] < kSmallProduct;
    }
    add_logarithms(after, mine, small);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float stick = enter(i, mine[i]);
#pragma unroll
      for (int g = kGroups - 1; g >= 0; --g) {
        const float next = stick * after[i][g];
        stick = next;
#pragma unroll
        for (int t = 4 * g; t < 4 * g + 4; ++t) {
          const float a = e[i][t] * stick;
          s.of_row(i, t) = a;
          stick += a;
        }
        stick = next;
      }
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
};

// Sticks with gates, with as few special functions as without: one power for each key and one
// reciprocal for four. With E = f e, u = 1 + (1 - f) e = 1 + E (1 - f) / f and w = 1 + e = u + E, a
// key takes E / w of the stick and leaves u / w of it; nothing is subtracted. Of two neighbours,
// from whose right a stick T comes, the right one takes E1 w0 of T / (w0 w1) and the left one E0
// u1.
template <int kRows, int kKeys>
struct GatedSticks : Sticks<kRows, kKeys, false> {
  using Base = Sticks<kRows, kKeys, false>;
  using Base::kLaneKeys, Base::kGroups;

  template <typename Scores, typename Seen>
  __device__ __forceinline__ void score(Scores& s, int block, float scale_log2, const Seen& seen,
                                        const ForwardGates<kKeys>& gates) {
    if (!warp_sees_all(seen, block, kKeys)) {
      const int first = block + kLaneKeys * quad_lane();
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        hide_keys<kLaneKeys>(s, i, first, seen.range(i), scale_log2);
      }
    }
    break_rows(s, scale_log2, gates);
  }

 private:
  // What four keys take of the stick T that comes from their right: the left two their part of
  // their scores' place times left T, the right two times right T. They leave all T.
  struct Parts {
    float left, right, all;
  };

  template <typename Scores>
  __device__ __forceinline__ void break_rows(Scores& s, float scale_log2,
                                             const ForwardGates<kKeys>& gates) {
    Parts parts[kRows][kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int q = quad_lane();
      const float4 shift = gates.log2[g][q], largest = gates.largest[g][q];
      const float4 closed = gates.closed[g][q];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        float e[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const float z = fmaf(s.of_row(i, 4 * g + n), scale_log2, element(shift, n));
          e[n] = exp2_ftz(fminf(z, element(largest, n)));
        }
        const float2 low = take(e[0], e[1], closed.x, closed.y, s, i, 4 * g);
        const float2 high = take(e[2], e[3], closed.z, closed.w, s, i, 4 * g + 2);
        const float r = reciprocal_ftz(low.y * high.y);
        const float left = high.x * r;
        parts[i][g] = {left, low.y * r, low.x * left};
      }
    }
    float after[kRows][kGroups], mine[kRows];
    bool small = false;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) after[i][g] = parts[i][g].all;
      mine[i] = pairwise_product<kGroups>(after[i]);
      small = small || mine[i] < kSmallProduct;
    }
    this->add_logarithms(after, mine, small);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float stick = this->enter(i, mine[i]);
#pragma unroll
      for (int g = kGroups - 1; g >= 0; --g) {
        const float right = stick * parts[i][g].right, left = stick * parts[i][g].left;
        s.of_row(i, 4 * g + 3) *= right;
        s.of_row(i, 4 * g + 2) *= right;
        s.of_row(i, 4 * g + 1) *= left;
        s.of_row(i, 4 * g) *= left;
        stick *= parts[i][g].all;
      }
    }
  }
  // Scores t and t + 1 become E0 u1 and E1 w0. Returns u0 u1 and w0 w1.
  template <typename Scores>
  static __device__ __forceinline__ float2 take(float e0, float e1, float closed0, float closed1,
                                                Scores& s, int i, int t) {
    const float u0 = fmaf(closed0, e0, 1.0f), u1 = fmaf(closed1, e1, 1.0f);
    const float w0 = u0 + e0, right = e1 * w0;
    s.of_row(i, t) = e0 * u1;
    s.of_row(i, t + 1) = right;
    return {u0 * u1, fmaf(w0, u1, right)};
  }
};

// The backward pass of a lane's kRows rows, from left to right. At the left edge of a block it
// needs log2 T of the stick that is left there, and C.
//
// Without gates, with A_t = beta_t T_{t+1} and T_t the stick that is left of key t,
//   dz_t = beta_t (T_t dp_t - C_t),  C_t = T_rem drem + the sum of A dp over the keys left of t,
// where T_rem is the remainder: C begins with T_rem drem, and drem is not needed any more.
// With gates C is the sum of g = A (dp - drem) over the keys further left.
template <int kRows, int kKeys, bool kGated>
struct StickGradients {
  static constexpr int kLaneKeys = kKeys / 4;
  float log2_left[kRows];  // the same in all lanes of a quad, and C and drem too
  float c[kRows];
  float drem[kRows];  // with gates

  // From this a lane finds A and dz of its keys alone.
  struct LaneState {
    float stick;  // T of the stick that comes to the lane's last key from the right
    float c;      // C at the left of its first key
  };

  // Sets row i to the left of its first key, where log2_rem is what is left of its stick.
  __device__ __forceinline__ void begin(int i, float log2_rem, float remainder_gradient) {
    log2_left[i] = log2_rem;
    c[i] = kGated ? 0.0f : remainder_gradient * exp2_ftz(log2_rem);
    drem[i] = remainder_gradient;
  }

  // Scores become A and their gradients by A (dp = do.v) become dz, both of the keys from `block`
  // on; advances the state to the next block. dgate, with a gate: += of the lane's keys.
  template <typename Scores, typename Seen, typename Scale>
  __device__ __forceinline__ void score(Scores& s, Scores& dp, int block, Scale scale_log2,
                                        const Seen& seen, const float* gates, float* dgate) {
    const auto save = [](int, LaneState) {};
    if constexpr (kGated) {
      score(s, dp, block, scale_log2, seen, gates + kLaneKeys * quad_lane(), dgate, save);
    } else {
      score(s, dp, block, scale_log2, seen, NoGates{}, nullptr, save);
    }
  }
  // The same where gates, if there are any, are in the odds (LaneGates or NoGates); save(i,
  // LaneState) is called for each row of the lane.
  template <typename Scores, typename Seen, typename Gates, typename Save, typename Scale>
  requires(!kGated) && requires { Gates::kAny; }
  __device__ __forceinline__ void score(Scores& s, Scores& dp, int block, Scale scale_log2,
                                        const Seen& seen, const Gates& gates, const Save& save) {
    score(s, dp, block, scale_log2, seen, gates, nullptr, save);
  }

  // Of one key: A, y = g - e C, and dz.
  struct Scored {
    float a, y, dz;
  };
  static constexpr int kSpare = 3 * kLaneKeys / 4;
  // Row i alone, where the lane's state is known and gates, if there are any, are in the odds:
  // put(t, Scored) is called for each of the lane's keys, after dp of the key has been read, and
  // nothing is exchanged between lanes. The row sees the keys `seen`, or all without kMasked.
  // `state()` returns the LaneState and is called as late as can be. At the end spare(n, x) is
  // called with kSpare numbers: where they are kept for nothing, but in registers that would be
  // idle otherwise, they live there as temporaries. So does what put() keeps for nothing.
  template <bool kMasked, typename Scores, typename State, typename Gates, typename Put,
            typename Spare, typename Scale>
  static __device__ __forceinline__ void score_row(const Scores& s, const Scores& dp, int i,
                                                   int block, Scale scale_log2, KeyRange seen,
                                                   const State& state, const Gates& gates,
                                                   const Put& put, const Spare& spare) {
    float e[kLaneKeys], kept[2 * kGroups], all[kGroups];
    find_odds<kMasked, kMasked>(e, s, i, block + kLaneKeys * quad_lane(), scale_log2,
                                SameKeys{seen}, gates);
    if constexpr (kMasked || Gates::kAny) {
      // Few blocks are masked, so the vote would gain less than it costs registers; odds with gates
      // are clamped in any case.
      keep_pairs(e, kept, all);
    } else {
      keep_or_clamp<false>(e, kept, all);
    }
    const LaneState lane = state();
    float right_of[kGroups + 1];  // right_of[g]: T left of group g, and so right of group g - 1
    right_of[kGroups] = lane.stick;
#pragma unroll
    for (int g = kGroups - 1; g >= 0; --g) right_of[g] = right_of[g + 1] * all[g];
    break_known(dp, i, e, kept, right_of, lane.c, gates, put);
#pragma unroll
    for (int n = 0; n < 2 * kGroups; ++n) spare(n, kept[n]);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) spare(2 * kGroups + g, right_of[g]);
  }

 private:
  // Keys go in groups of four: chains of dependent operations stay short, and the groups' run side
  // by side.
  static constexpr int kGroups = kLaneKeys / 4;

  struct SameKeys {
    KeyRange of_rows;
    __device__ __forceinline__ KeyRange range(int) const { return of_rows; }
  };

  template <typename Gates>
  static constexpr bool kInOdds = std::is_same_v<Gates, LaneGates>;
  // `gates` are those of the lane's keys.
  template <typename Scores, typename Seen, typename Gates, typename Save, typename Scale>
  __device__ __forceinline__ void score(Scores& s, Scores& dp, int block, Scale scale_log2,
                                        const Seen& seen, const Gates& gates, float* dgate,
                                        const Save& save) {
    const int first = block + kLaneKeys * quad_lane();
    const bool all = warp_sees_all(seen, block, kKeys);
    if constexpr (kInOdds<Gates>) {
      if (!all) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          hide_keys<kLaneKeys>(s, i, first, seen.range(i), scale_log2);
        }
      }
      break_block<false>(s, dp, first, scale_log2, seen, gates, dgate, save);
    } else if (all) {
      break_block<false>(s, dp, first, scale_log2, seen, gates, dgate, save);
    } else {
      break_block<true>(s, dp, first, scale_log2, seen, gates, dgate, save);
    }
  }

  // e of the lane's keys, or e' with gates in the odds.
  template <bool kMasked, bool kClamped, typename Scores, typename Seen, typename Gates,
            typename Scale>
  static __device__ __forceinline__ void find_odds(float (&e)[kLaneKeys], const Scores& s, int i,
                                                   int first, Scale scale_log2, const Seen& seen,
                                                   const Gates& gates) {
    if constexpr (Gates::kAny) {
      static_assert(!kMasked);
      gated_odds(e, s, i, scale_log2, gates);
    } else {
      exponentials<kMasked, kClamped>(e, s, i, first, scale_log2, seen);
    }
  }

  template <bool kMasked, typename Scores, typename Seen, typename Gates, typename Save,
            typename Scale>
  __device__ __forceinline__ void break_block(Scores& s, Scores& dp, int first, Scale scale_log2,
                                              const Seen& seen, const Gates& gates, float* dgate,
                                              const Save& save) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float e[kLaneKeys], sums[kGroups];
      if constexpr (kGated) {
        exponentials<kMasked, true>(e, s, i, first, scale_log2, seen);
        float r[kLaneKeys], kept[kGroups], stick[kGroups];
        const float mine = keep_gated(e, r, kept, gates);
        stick[kGroups - 1] = exp2_ftz(pass(i, mine));
#pragma unroll
        for (int g = kGroups - 1; g > 0; --g) stick[g - 1] = stick[g] * kept[g];
        break_groups_gated(s, dp, i, e, r, stick, sums, gates);
        advance(i, sums);
        differentiate_gated(dp, i, e, r, sums, gates, dgate);
      } else {
        float kept[2 * kGroups];
        find_odds<kMasked, false>(e, s, i, first, scale_log2, seen, gates);
        const float mine = keep<kInOdds<Gates>>(e, kept);
        const float stick = exp2_ftz(pass(i, mine));
        break_pairs(s, dp, i, e, kept, stick, sums);
        advance(i, sums);
        save(i, LaneState{stick, sums[0]});
        differentiate_pairs(dp, i, e, kept, sums, gates);
      }
    }
  }

 public:
  // What each pair of keys leaves, from which the reciprocals of its keys follow, and what each
  // group leaves; whether none of these of any lane of the warp is less than 2^-31. Then no e is as
  // large as the clamp, which is left out. With kClamped no e is larger in any case.
  template <bool kClamped>
  static __device__ __forceinline__ bool keep_or_clamp(float (&e)[kLaneKeys],
                                                       float (&kept)[2 * kGroups],
                                                       float (&all)[kGroups]) {
    // Without the clamp e may be infinite: then what a group leaves is zero or, where another e is
    // zero, not a number.
    keep_pairs(e, kept, all);
    float least = all[0];
#pragma unroll
    for (int g = 1; g < kGroups; ++g) least = min_or_nan(least, all[g]);
    if (__all_sync(~0u, least >= 1.0f / kLargest)) return true;
    if constexpr (!kClamped) {
      clamp(e);
      keep_pairs(e, kept, all);
    }
    return false;
  }
  // The same, and returns log2 of what all keys leave. Where the clamp is left out, one logarithm
  // is enough for four groups, whose product is a normal number.
  template <bool kClamped>
  static __device__ __forceinline__ float keep(float (&e)[kLaneKeys], float (&kept)[2 * kGroups]) {
    float all[kGroups];
    constexpr int kAtOnce = kGroups < 4 ? kGroups : 4;
    if (keep_or_clamp<kClamped>(e, kept, all)) return sum_of_logarithms<kAtOnce>(all);
    return sum_of_logarithms<1>(all);
  }
  // One logarithm for kAtOnce groups.
  template <int kAtOnce>
  static __device__ __forceinline__ float sum_of_logarithms(const float (&all)[kGroups]) {
    static_assert(kGroups % kAtOnce == 0);
    float sum = log2_ftz(pairwise_product<kAtOnce>(all));
#pragma unroll
    for (int g = kAtOnce; g < kGroups; g += kAtOnce) {
      sum += log2_ftz(pairwise_product<kAtOnce>(all + g));
    }
    return sum;
  }
  // One reciprocal serves four keys.
  static __device__ __forceinline__ void keep_pairs(const float (&e)[kLaneKeys],
                                                    float (&kept)[2 * kGroups],
                                                    float (&all)[kGroups]) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const float* const x = e + 4 * g;
      const float u0 = 1.0f + x[0], u2 = 1.0f + x[2];
      const float low = fmaf(x[1], u0, u0), high = fmaf(x[3], u2, u2);
      all[g] = reciprocal_ftz(low * high);
      kept[2 * g] = all[g] * high;
      kept[2 * g + 1] = all[g] * low;
    }
  }

 private:
  // With gates: what each group leaves, r of each key, and log2 of what all leave.
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
        x[n] = keep_of(r[t], gates[t]);
      }
      kept[g] = (x[0] * x[1]) * (x[2] * x[3]);
      mine += log2_ftz(kept[g]);
    }
    return mine;
  }
  static __device__ __forceinline__ float keep_of(float r, float gate) {
    return fmaf(gate, r, 1.0f - gate);
  }

  // sum + x of the lanes of the quad further left.
  static __device__ __forceinline__ float add_left(float sum, float x) {
    const float from_1 = __shfl_up_sync(~0u, x, 1, 4);
    const float from_2 = __shfl_up_sync(~0u, x, 2, 4);
    const float from_3 = __shfl_up_sync(~0u, x, 3, 4);
    if (quad_lane() >= 3) sum += from_3;
    if (quad_lane() >= 2) sum += from_2;
    if (quad_lane() >= 1) sum += from_1;
    return sum;
  }

  // log2 of the stick before the lane's rightmost key, where the lane's keys leave `mine` (log2).
  // Moves log2_left to the end of the block.
  __device__ __forceinline__ float pass(int i, float mine) {
    const float after = add_left(log2_left[i], -mine) - mine;
    log2_left[i] = __shfl_sync(~0u, after, 3, 4);
    return after;
  }

  // sums: of each group; they become C at the left of each group. Moves C to the end of the block.
  __device__ __forceinline__ void advance(int i, float (&sums)[kGroups]) {
    const float mine = pairwise_sum<kGroups>(sums);
    const float c_left = add_left(c[i], mine);
    c[i] = __shfl_sync(~0u, c_left + mine, 3, 4);
    left_of_groups(c_left, sums);
  }
  // The sum of each group becomes that of all keys further left, where c_left is that of the lane.
  static __device__ __forceinline__ void left_of_groups(float c_left, float (&sums)[kGroups]) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const float sum = sums[g];
      sums[g] = c_left;
      c_left += sum;
    }
  }

  // A, and g = A dp in place of dp; sums: of g of each group. From right to left, where the pairs
  // of keys leave `kept`.
  template <typename Scores>
  static __device__ __forceinline__ void break_pairs(Scores& s, Scores& dp, int i,
                                                     const float (&e)[kLaneKeys],
                                                     const float (&kept)[2 * kGroups], float stick,
                                                     float (&sums)[kGroups]) {
#pragma unroll
    for (int g = kGroups - 1; g >= 0; --g) {
      float of_pair[2];
#pragma unroll
      for (int n = 1; n >= 0; --n) {
        const int t = 4 * g + 2 * n;
        stick *= kept[2 * g + n];
        const float a = e[t] * stick;
        const float next = e[t + 1] * (stick + a);
        s.of_row(i, t) = a;
        s.of_row(i, t + 1) = next;
        dp.of_row(i, t) *= a;
        dp.of_row(i, t + 1) *= next;
        of_pair[n] = dp.of_row(i, t) + dp.of_row(i, t + 1);
      }
      sums[g] = of_pair[0] + of_pair[1];
    }
  }
  // g becomes dz = r (g - e C), with r = 1 / (1 + e); c_left: C of each group's first key.
  template <typename Scores, typename Gates>
  static __device__ __forceinline__ void differentiate_pairs(Scores& dp, int i,
                                                             const float (&e)[kLaneKeys],
                                                             const float (&kept)[2 * kGroups],
                                                             const float (&c_left)[kGroups],
                                                             const Gates& gates) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const Complements<Gates> complements(gates, g);
      float c = c_left[g];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int t = 4 * g + n;
        const float of_pair = kept[2 * g + n / 2];
        const float r = complements.of(n, fmaf(of_pair, e[t ^ 1], of_pair));
        const float gradient = dp.of_row(i, t);
        dp.of_row(i, t) = r * fmaf(-e[t], c, gradient);
        if (n < 3) c += gradient;
      }
    }
  }

  // Calls put(t, Scored) for each key, where T right of each group and C at the lane's left are
  // known. C goes from left to right over all keys, the stick over those of each pair.
  template <typename Scores, typename Gates, typename Put>
  static __device__ __forceinline__ void break_known(const Scores& dp, int i,
                                                     const float (&e)[kLaneKeys],
                                                     const float (&kept)[2 * kGroups],
                                                     const float (&right_of)[kGroups + 1], float c,
                                                     const Gates& gates, const Put& put) {
#pragma unroll
    for (int n = 0; n < 2 * kGroups; ++n) {
      const int t = 2 * n;
      const Complements<Gates> complements(gates, n / 2);
      const float stick = n % 2 == 0 ? right_of[n / 2] : right_of[n / 2 + 1] * kept[n];
      const float a = e[t] * stick;
      const float next = e[t + 1] * (stick + a);
      const float g = a * dp.of_row(i, t), g_next = next * dp.of_row(i, t + 1);
      const float r = complements.of(t % 4, fmaf(kept[n], e[t + 1], kept[n]));
      const float r_next = complements.of(t % 4 + 1, fmaf(kept[n], e[t], kept[n]));
      const float y = fmaf(-e[t], c, g);
      put(t, Scored{a, y, r * y});
      c += g;
      const float y_next = fmaf(-e[t + 1], c, g_next);
      put(t + 1, Scored{next, y_next, r_next * y_next});
      c += g_next;
    }
  }

  // A, and g = A (dp - drem) in place of dp; e becomes sigma. sums: of g of each group.
  template <typename Scores>
  __device__ __forceinline__ void break_groups_gated(Scores& s, Scores& dp, int i,
                                                     float (&e)[kLaneKeys],
                                                     const float (&r)[kLaneKeys],
                                                     float (&stick)[kGroups],
                                                     float (&sums)[kGroups], const float* gates) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      sums[g] = 0.0f;
#pragma unroll
      for (int t = 4 * g + 3; t >= 4 * g; --t) {
        float& score = s.of_row(i, t);
        float& gradient = dp.of_row(i, t);
        e[t] *= r[t];
        score = gates[t] * e[t] * stick[g];
        gradient = score * (gradient - drem[i]);
        sums[g] += gradient;
        stick[g] *= keep_of(r[t], gates[t]);
      }
    }
  }
  // With beta = f sigma: d beta = g / beta - C / keep.
  template <typename Scores>
  static __device__ __forceinline__ void differentiate_gated(Scores& dp, int i,
                                                             const float (&sigma)[kLaneKeys],
                                                             const float (&r)[kLaneKeys],
                                                             float (&c_left)[kGroups],
                                                             const float* gates, float* dgate) {
#pragma unroll
    for (int t = 0; t < kLaneKeys; ++t) {
      float& gradient = dp.of_row(i, t);
      const float mine = gradient;
      const float by_keep = c_left[t / 4] * reciprocal_ftz(keep_of(r[t], gates[t]));
      gradient = (mine - gates[t] * sigma[t] * by_keep) * r[t];
      if (dgate) dgate[t] += (gates[t] > 0.0f ? mine / gates[t] : 0.0f) - sigma[t] * by_keep;
      c_left[t / 4] += mine;
    }
  }
};

}  // namespace sbtrain::kernels
