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

}  // namespace sbtrain::kernels
