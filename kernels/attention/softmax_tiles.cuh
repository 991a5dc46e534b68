// What the main loops of softmax attention share, for any score function (score_scaled.cuh).
#pragma once

#include "kernels/attention/heads.cuh"
#include "kernels/attention/softmax.h"
#include "kernels/attention/softmax_far.h"
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

__device__ __forceinline__ Visibility visibility_of(const SoftmaxFarProblem& p) {
  return {.tokens = p.tokens,
          .reach = p.window > 0 ? p.window - 1 : INT_MAX,
          .far = true,
          .far_queries = p.queries,
          .far_key = p.first_key,
          .far_distance = p.distance};
}
template <typename Problem>
inline constexpr bool kIsFar = std::is_same_v<Problem, SoftmaxFarProblem>;
// How far the keys of a problem's tensors lie before its queries, beside their places in these.
__device__ __forceinline__ int distance_of(const SoftmaxProblem&) {
  return 0;
}
__device__ __forceinline__ int distance_of(const SoftmaxFarProblem& p) {
  return p.distance;
}
// The first key that any query sees.
__device__ __forceinline__ int first_key_of(const SoftmaxProblem&) {
  return 0;
}
__device__ __forceinline__ int first_key_of(const SoftmaxFarProblem& p) {
  return p.first_key;
}
__device__ __forceinline__ float* sum_row(const SoftmaxHead& head, const Matrix<float>& x,
                                          int row) {
  return x.data + row * x.stride + head.index * head.p.head_dim;
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
