// Sums over groups of threads, in a fixed order; every thread of the group gets the result.
#pragma once

#include "kernels/launch.h"

namespace sbtrain::kernels {

// The sum over kLanes neighbouring lanes of a warp; kLanes is a power of two.
template <int kLanes, typename T>
__device__ T lanes_sum(T x) {
  static_assert(kLanes <= 32);
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

// kCount sums at once, over kLanes lanes of a warp or over a block of kLanes threads. All threads
// of the warp or block must take part.
template <int kLanes, int kCount, typename T>
__device__ void group_sum(T (&x)[kCount]) {
  constexpr int kWarps = kLanes / 32;
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = lanes_sum<(kLanes < 32 ? kLanes : 32)>(x[i]);
  if constexpr (kWarps > 1) {
    __shared__ T sums[kCount][kWarps];
    if (threadIdx.x % 32 == 0) {
      for (int i = 0; i < kCount; ++i) sums[i][threadIdx.x / 32] = x[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] = 0;
      for (int warp = 0; warp < kWarps; ++warp) x[i] += sums[i][warp];
    }
    __syncthreads();  // before the next call writes `sums`
  }
}

}  // namespace sbtrain::kernels
