// The softmax of rows whose scores come tile by tile (online softmax, FlashAttention-2, arXiv
// 2307.08691).
#pragma once

#include "kernels/primitives/accumulator.cuh"
#include "kernels/primitives/math.cuh"

namespace sbtrain::kernels {

// Stands for "no key yet". Finite, so that differences with a masked score are never NaN.
inline constexpr float kNoMaximum = -1e30f;

// Running maximum and sum of the lane's rows. The maximum may lag behind the scores, so that o is
// not scaled for every tile that has a larger one.
template <int kRowBlocks>
struct RunningSoftmax {
  static constexpr float kLag = 8.0f;
  __device__ __forceinline__ RunningSoftmax() {
#pragma unroll
    for (int i = 0; i < 2 * kRowBlocks; ++i) maximum[i] = kNoMaximum, sum[i] = 0.0f;
  }
  // Scores become 2^(score - maximum). A maximum that lags too far is raised, o and sum rescaled.
  template <int kKeyBlocks, int kColBlocks>
  __device__ __forceinline__ void add(Accumulator<kRowBlocks, kKeyBlocks>& s,
                                      Accumulator<kRowBlocks, kColBlocks>& o) {
    float factor[2 * kRowBlocks];
    if (raise(s, factor)) rescale(factor, o);
    exponentiate(s);
  }

  // The same in parts, for main loops in which the product that o belongs to is still under way.
  // Raises the maxima if one of the warp's rows lags too far behind its scores. Returns whether it
  // did; then the rows of o have to be multiplied by `factor`.
  template <int kKeyBlocks>
  __device__ __forceinline__ bool raise(Accumulator<kRowBlocks, kKeyBlocks>& s,
                                        float (&factor)[2 * kRowBlocks]) {
    float now[2 * kRowBlocks];
#pragma unroll
    for (int i = 0; i < 2 * kRowBlocks; ++i) now[i] = maximum[i];
    s.for_each([&](float x, auto at) { now[at.lane_row] = fmaxf(now[at.lane_row], x); });
    bool behind = false;
#pragma unroll
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      now[i] = quad_max(now[i]);
      behind |= now[i] > maximum[i] + kLag;
    }
    if (!__any_sync(~0u, behind)) return false;
#pragma unroll
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      factor[i] = exp2_ftz(maximum[i] - now[i]);
      maximum[i] = now[i];
      sum[i] *= factor[i];
    }
    return true;
  }
  template <int kColBlocks>
  __device__ __forceinline__ static void rescale(const float (&factor)[2 * kRowBlocks],
                                                 Accumulator<kRowBlocks, kColBlocks>& o) {
    o.for_each([&](float& x, auto at) { x *= factor[at.lane_row]; });
  }
  template <int kKeyBlocks>
  __device__ __forceinline__ void exponentiate(Accumulator<kRowBlocks, kKeyBlocks>& s) {
    s.for_each([&](float& x, auto at) {
      x = exp2_ftz(x - maximum[at.lane_row]);
      sum[at.lane_row] += x;  // of this lane's columns; the quad's are added at the end
    });
  }
  float maximum[2 * kRowBlocks], sum[2 * kRowBlocks];
};

}  // namespace sbtrain::kernels
