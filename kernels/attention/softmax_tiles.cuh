// What the main loops of softmax attention share, for any score function (score_scaled.cuh).
#pragma once

#include "kernels/attention/heads.cuh"
#include "kernels/attention/softmax.h"
#include "kernels/attention/tile_products.cuh"
#include "kernels/attention/visibility.cuh"
#include "kernels/primitives/math.cuh"
#include "kernels/primitives/thread_group.cuh"

namespace sbtrain::kernels {

using SoftmaxHead = Head<SoftmaxProblem>;

__device__ __forceinline__ Visibility visibility_of(const SoftmaxProblem& p) {
  return {.tokens = p.tokens,
          .positions = p.positions,
          .cu_seqlens = p.cu_seqlens,
          .sequences = p.sequences,
          .reach = p.window > 0 ? p.window - 1 : INT_MAX};
}

// Two stages of a tile of kRows rows: one is computed with while the next one arrives.
template <int kRows, int kD>
struct TileStages {
  static constexpr int kElements = 2 * kRows * kD;
  __nv_bfloat16* first;
  __device__ __forceinline__ __nv_bfloat16* at(int stage) const {
    return first + stage * kRows * kD;
  }
};

// Loads rows [first, first + kRows) of x.
template <int kRows, int kD, typename Group>
__device__ __forceinline__ void load_rows(const Group& group, __nv_bfloat16* tile,
                                          const SoftmaxHead& head, const HeadRows& x, int first) {
  load_tile<kRows, kD>(group, tile, head.row(x, first), x.stride, head.p.tokens - first,
                       head.p.head_dim);
}

}  // namespace sbtrain::kernels
