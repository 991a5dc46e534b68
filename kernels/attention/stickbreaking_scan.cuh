// The scan along the keys that makes stick-breaking attention, on accumulators of tensor cores.
//
// Key tiles lie in shared memory in a permuted order (key_of_row): then each lane of a quad holds
// 16 consecutive keys of its rows, and the scan is serial in registers but for a few shuffles
// within the quad. All is done in product space: with e = 2^(z log2 e) a key takes
// beta = e / (1 + e) of the stick and leaves 1 / (1 + e) of it.
#pragma once

#include "kernels/attention/tile_products.cuh"

namespace sbtrain::kernels {

constexpr int kStickKeys = 64;             // of a block of keys
constexpr int kLaneKeys = kStickKeys / 4;  // consecutive keys that a lane holds
constexpr float kLog2e = 1.4426950408889634f;
// e is clamped to 2^31, so that the product of four (1 + e) is finite. What leaks is 2^-31.
constexpr float kLargestLogit = 31.0f;

// The key of a block that lies in row `row` of its tile, and so in column `row` of the scores.
// A lane q = lane % 4 holds columns 8c + 2q + b, b = 0, 1: its keys are 16q + 2c + b.
__device__ __forceinline__ int key_of_row(int row) {
  return kLaneKeys * (row % 8 / 2) + row / 8 * 2 + row % 2;
}

__device__ __forceinline__ float exp2_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_ftz(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal_ftz(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ int quad_lane() {
  return static_cast<int>(threadIdx.x) % 4;
}
// Of lane q + distance of the quad, or `outside` where there is none.
__device__ __forceinline__ float from_right(float x, int distance, float outside) {
  const float y = __shfl_down_sync(~0u, x, distance, 4);
  return quad_lane() + distance < 4 ? y : outside;
}
__device__ __forceinline__ float from_left(float x, int distance, float outside) {
  const float y = __shfl_up_sync(~0u, x, distance, 4);
  return quad_lane() >= distance ? y : outside;
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Keys [begin[i], end[i]) of the pack are seen by the lane's row i.
template <int kRowBlocks>
struct RowRanges {
  int begin[2 * kRowBlocks], end[2 * kRowBlocks];
};

// e of the lane's 16 keys of row i of the scores; `first` is the lane's first key.
template <bool kMasked, int kRowBlocks>
__device__ __forceinline__ void exponentials(float (&e)[kLaneKeys],
                                             const Accumulator<kRowBlocks, 8>& s, int i, int first,
                                             float scale_log2, const RowRanges<kRowBlocks>& seen) {
#pragma unroll
  for (int t = 0; t < kLaneKeys; ++t) {
    const float z = s.at[i / 2][t / 2][i % 2 * 2 + t % 2] * scale_log2;
    e[t] = exp2_ftz(fminf(z, kLargestLogit));
    if (kMasked && (first + t < seen.begin[i] || first + t >= seen.end[i])) e[t] = 0.0f;
  }
}

// The sticks of a lane's rows on their way from right to left.
template <int kRowBlocks, bool kGated>
struct Sticks {
  float left[2 * kRowBlocks];       // T, the stick that is left: the same in all lanes of a quad
  float log2_left[2 * kRowBlocks];  // the lane's part of log2 T

  __device__ __forceinline__ Sticks() {
#pragma unroll
    for (int i = 0; i < 2 * kRowBlocks; ++i) left[i] = 1.0f, log2_left[i] = 0.0f;
  }

  // Scores of a block become A; gates are those of the lane's keys.
  template <bool kMasked>
  __device__ __forceinline__ void break_block(Accumulator<kRowBlocks, 8>& s, int first,
                                              float scale_log2, const RowRanges<kRowBlocks>& seen,
                                              const float* gates) {
#pragma unroll
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      float e[kLaneKeys];
      exponentials<kMasked>(e, s, i, first, scale_log2, seen);
      if constexpr (kGated) {
        break_row_gated(s, i, e, gates);
      } else {
        break_row(s, i, e);
      }
    }
  }

 private:
  // One reciprocal for four keys. With T_t the stick after key t: A_t = e_t T_t, and T_t of the
  // next key to the right is T_t + A_t.
  __device__ __forceinline__ void break_row(Accumulator<kRowBlocks, 8>& s, int i,
                                            const float (&e)[kLaneKeys]) {
    float after[kLaneKeys / 4];  // product of 1 / (1 + e) over four keys
    float mine = 1.0f;
#pragma unroll
    for (int g = 0; g < kLaneKeys / 4; ++g) {
      const float* x = e + 4 * g;
      const float product = ((1.0f + x[0]) * (1.0f + x[1])) * ((1.0f + x[2]) * (1.0f + x[3]));
      after[g] = reciprocal_ftz(product);
      log2_left[i] -= log2_ftz(product);
      mine *= after[g];
    }
    float stick = enter(i, mine);
#pragma unroll
    for (int g = kLaneKeys / 4 - 1; g >= 0; --g) {
      const float next = stick * after[g];
      stick = next;
#pragma unroll
      for (int t = 4 * g; t < 4 * g + 4; ++t) {
        const float a = e[t] * stick;
        s.at[i / 2][t / 2][i % 2 * 2 + t % 2] = a;
        stick += a;
      }
      stick = next;
    }
  }

  __device__ __forceinline__ void break_row_gated(Accumulator<kRowBlocks, 8>& s, int i,
                                                  const float (&e)[kLaneKeys], const float* gates) {
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
      s.at[i / 2][t / 2][i % 2 * 2 + t % 2] = beta[t] * stick;
      stick *= keep[t];
    }
  }

  // The stick before the lane's rightmost key, where `mine` of it is left after the lane's keys;
  // and `left` after the block.
  __device__ __forceinline__ float enter(int i, float mine) {
    const float right =
        from_right(mine, 1, 1.0f) * from_right(mine, 2, 1.0f) * from_right(mine, 3, 1.0f);
    const float before = left[i] * right;
    left[i] *= __shfl_sync(~0u, mine * right, 0, 4);
    return before;
  }
};

// The backward pass of a lane's rows, from left to right. Where a block begins it needs log2 T of
// the stick that is left there and C, the sum of g over the keys further left.
template <int kRowBlocks, bool kGated>
struct StickGradients {
  float log2_left[2 * kRowBlocks];  // the same in all lanes of a quad, and C and drem too
  float c[2 * kRowBlocks];
  float drem[2 * kRowBlocks];

  // Scores become A and their gradients by A (dp = do.v) become dz, both of one block; advances
  // the state to the next block. dgate, with a gate: += of the lane's keys.
  template <bool kMasked>
  __device__ __forceinline__ void break_block(Accumulator<kRowBlocks, 8>& s,
                                              Accumulator<kRowBlocks, 8>& dp, int first,
                                              float scale_log2, const RowRanges<kRowBlocks>& seen,
                                              const float* gates, float* dgate) {
#pragma unroll
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      float e[kLaneKeys], r[kLaneKeys], kept[kGroups];
      exponentials<kMasked>(e, s, i, first, scale_log2, seen);
      float stick[kGroups], prefix[kGroups];
      enter(i, e, r, kept, stick, gates);
      break_groups(s, dp, i, e, r, stick, prefix, gates);
      differentiate(dp, i, e, r, prefix, gates, dgate);
    }
  }

 private:
  // Keys go in groups of four: chains of dependent operations stay short, and the groups' run side
  // by side.
  static constexpr int kGroups = kLaneKeys / 4;

  static __device__ __forceinline__ float keep(float r, const float* gates, int t) {
    return kGated ? fmaf(gates[t], r, 1.0f - gates[t]) : r;
  }

  // r = 1 / (1 + e) of the lane's keys, what each group leaves, and the stick before each group's
  // rightmost key; moves log2_left behind the block.
  __device__ __forceinline__ void enter(int i, const float (&e)[kLaneKeys], float (&r)[kLaneKeys],
                                        float (&kept)[kGroups], float (&stick)[kGroups],
                                        const float* gates) {
    float mine = 0.0f;  // log2 of what the lane's keys leave
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
    const float from_1 = from_left(mine, 1, 0.0f);
    const float from_2 = from_left(mine, 2, 0.0f);
    const float from_3 = from_left(mine, 3, 0.0f);
    const float behind = log2_left[i] - (from_3 + from_2 + from_1 + mine);
    log2_left[i] = __shfl_sync(~0u, behind, 3, 4);
    stick[kGroups - 1] = exp2_ftz(behind);
#pragma unroll
    for (int g = kGroups - 1; g > 0; --g) stick[g - 1] = stick[g] * kept[g];
  }

  // Right to left: A, and g = A (dp - drem) in place of dp; e becomes sigma. prefix: the sum of g
  // left of each group.
  __device__ __forceinline__ void break_groups(Accumulator<kRowBlocks, 8>& s,
                                               Accumulator<kRowBlocks, 8>& dp, int i,
                                               float (&e)[kLaneKeys], const float (&r)[kLaneKeys],
                                               float (&stick)[kGroups], float (&prefix)[kGroups],
                                               const float* gates) {
    float sums[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      sums[g] = 0.0f;
#pragma unroll
      for (int t = 4 * g + 3; t >= 4 * g; --t) {
        float& score = s.at[i / 2][t / 2][i % 2 * 2 + t % 2];
        float& gradient = dp.at[i / 2][t / 2][i % 2 * 2 + t % 2];
        e[t] *= r[t];
        score = (kGated ? gates[t] * e[t] : e[t]) * stick[g];
        gradient = score * (gradient - drem[i]);
        sums[g] += gradient;
        stick[g] *= keep(r[t], gates, t);
      }
    }
    const float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
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
  __device__ __forceinline__ void differentiate(Accumulator<kRowBlocks, 8>& dp, int i,
                                                const float (&sigma)[kLaneKeys],
                                                const float (&r)[kLaneKeys],
                                                float (&prefix)[kGroups], const float* gates,
                                                float* dgate) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int t = 4 * g; t < 4 * g + 4; ++t) {
        float& gradient = dp.at[i / 2][t / 2][i % 2 * 2 + t % 2];
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
