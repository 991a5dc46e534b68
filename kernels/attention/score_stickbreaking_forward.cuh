// Breaking sticks from right to left: the forward pass of the score (score_stickbreaking.cuh).
#pragma once

#include "kernels/attention/score_stickbreaking.cuh"

namespace sbtrain::kernels {

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

}  // namespace sbtrain::kernels
