// The backward pass of the score (score_stickbreaking.cuh), from left to right.
#pragma once

#include <type_traits>

#include "kernels/attention/score_stickbreaking.cuh"

namespace sbtrain::kernels {

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
