// Softmax attention forward (FlashAttention-2, arXiv 2307.08691): a tile of queries walks over its
// keys from left to right.
#pragma once

#include "kernels/attention/coordinates.cuh"
#include "kernels/attention/epilogue.cuh"
#include "kernels/attention/running_softmax.cuh"
#include "kernels/attention/softmax_tiles.cuh"

namespace sbtrain::kernels {

template <int kHeadDim>
struct SoftmaxForwardShape {
  static constexpr int kD = kHeadDim;
  static constexpr int kWarps = 4;
  static constexpr int kBlocks = kD == 32 ? 3 : 1;  // at least so many on a multiprocessor
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRowBlocks = kD > 128 ? 1 : 2;  // of 16 queries, each warp
  static constexpr int kQueries = 16 * kRowBlocks * kWarps;
  static constexpr int kKeys = kD >= 128 ? 32 : 64;
  static constexpr bool kKeepQueries = kD <= 64;
  static constexpr int kSharedBytes = 2 * kD * (kQueries + 2 * 2 * kKeys);
};

// Writes o and lse of the warp's rows.
template <int kRowBlocks, int kColBlocks>
__device__ __forceinline__ void write_softmax(const SoftmaxProblem& p, const SoftmaxHead& head,
                                              int first,
                                              const Accumulator<kRowBlocks, kColBlocks>& o,
                                              RunningSoftmax<kRowBlocks>& softmax) {
  const int rows = p.tokens - first;
#pragma unroll
  for (int i = 0; i < 2 * kRowBlocks; ++i) {
    softmax.sum[i] = quad_sum(softmax.sum[i]);
    const int row = lane_row() + i * 8;
    if (quad_lane() == 0 && row < rows) {
      p.lse[head.at(first) + row] = (softmax.maximum[i] + log2f(softmax.sum[i])) / kLog2e;
    }
  }
  store_rows(head.row(p.o, first), p.o.stride, rows, p.head_dim, o,
             [&](int i) { return 1.0f / softmax.sum[i]; });
}

// What the range of keys gives to the warp's rows is merged with what others have given
// (ops/far_softmax.h).
template <int kRowBlocks, int kColBlocks>
__device__ __forceinline__ void merge_softmax(const SoftmaxFarProblem& p, const SoftmaxHead& head,
                                              int first, Accumulator<kRowBlocks, kColBlocks>& o,
                                              RunningSoftmax<kRowBlocks>& softmax) {
  const int rows = p.queries - first;
  float keep[2 * kRowBlocks], add[2 * kRowBlocks];
#pragma unroll
  for (int i = 0; i < 2 * kRowBlocks; ++i) {
    const float sum = quad_sum(softmax.sum[i]);
    const int row = lane_row() + i * 8;
    keep[i] = 1.0f, add[i] = 0.0f;
    if (row >= rows || sum == 0.0f) continue;  // a window may hide all keys
    const float others = p.lse[head.at(first) + row] * kLog2e;
    const float mine = softmax.maximum[i] + log2f(sum);
    const float larger = fmaxf(others, mine);
    const float both = larger + log2f(exp2f(others - larger) + exp2f(mine - larger));
    keep[i] = exp2f(others - both), add[i] = exp2f(mine - both) / sum;
    softmax.maximum[i] = both;
  }
  __syncwarp();  // the lanes of a quad have read what one of them replaces
#pragma unroll
  for (int i = 0; i < 2 * kRowBlocks; ++i) {
    const int row = lane_row() + i * 8;
    if (quad_lane() != 0 || row >= rows || add[i] == 0.0f) continue;
    p.lse[head.at(first) + row] = softmax.maximum[i] / kLog2e;
  }
  combine_rows(
      sum_row(head, p.o_sum, first), p.o_sum.stride, rows, p.head_dim, o,
      [&](int i) { return keep[i]; }, [&](int i) { return add[i]; });
}

template <typename Shape, typename Policy, typename Problem = SoftmaxProblem>
static __global__ __launch_bounds__(Shape::kThreads, Shape::kBlocks) void softmax_forward_kernel(
    Problem p, const __grid_constant__ Policy policy) {
  constexpr int kD = Shape::kD, kKeys = Shape::kKeys, kRowBlocks = Shape::kRowBlocks;
  using Scores = typename Policy::template QueryRows<Shape>;
  using Keys = TileStages<kKeys, kD>;
  extern __shared__ __align__(128) unsigned char shared[];
  auto* const q_tile = reinterpret_cast<__nv_bfloat16*>(shared);
  const Keys k_tiles{q_tile + Shape::kQueries * kD};
  const Keys v_tiles{k_tiles.first + Keys::kElements};
  char* const policy_stages = reinterpret_cast<char*>(v_tiles.first + Keys::kElements);

  const BlockThreads<Shape::kThreads> group;
  // The last queries see the most keys, so they start first.
  const SoftmaxHead head = head_of_block<SoftmaxProblem>(p);
  const SoftmaxHead key_head = head.of_keys();
  const int first = static_cast<int>(gridDim.x - 1 - blockIdx.x) * Shape::kQueries;
  load_rows<Shape::kQueries, kD>(group, q_tile, head, p.q, first);
  const int warp_row = group.warp() * 16 * kRowBlocks;
  const Visibility visibility = visibility_of(p);
  const LaneKeys<kRowBlocks, kIsFar<Problem>> seen(visibility, first + warp_row);
  Scores scores(policy, {head.index, first, warp_row});
  const auto load_keys = [&](int key, int stage) {
    load_rows<kKeys, kD>(group, k_tiles.at(stage), key_head, p.k, key);
    load_rows<kKeys, kD>(group, v_tiles.at(stage), key_head, p.v, key);
    scores.load(group, policy_stages + stage * Scores::stage_bytes(), key);
    cp_async_commit();
  };

  const int begin = visibility.first_key(first) / kKeys * kKeys;
  const int end = kIsFar<Problem> ? p.tokens : min(first + Shape::kQueries, p.tokens);
  if (kIsFar<Problem> && begin >= end) return;  // a window hides all keys
  load_keys(begin, 0);
  TileRows<kRowBlocks, kD, Shape::kKeepQueries> q(q_tile, warp_row);
  Accumulator<kRowBlocks, kD / 8> o;
  o.clear();
  RunningSoftmax<kRowBlocks> softmax;
  for (int key = begin, stage = 0; key < end; key += kKeys, stage ^= 1) {
    cp_async_wait<0>();
    group.sync();
    if (key == begin) q.load();
    if (key + kKeys < end) load_keys(key + kKeys, stage ^ 1);
    if (!seen.some(key, kKeys)) continue;
    Accumulator<kRowBlocks, kKeys / 8> s;
    product_with_rows(s, q, k_tiles.at(stage));
    scores.enter(policy_stages + stage * Scores::stage_bytes(), key - distance_of(p));
    scores.score(s);
    seen.mask(s, key);
    softmax.add(s, o);
    add_product<kRowBlocks, kKeys / 8, kD>(o, s, v_tiles.at(stage));
  }
  if constexpr (kIsFar<Problem>) {
    merge_softmax(p, head, seen.first, o, softmax);
  } else {
    write_softmax(p, head, seen.first, o, softmax);
  }
}

}  // namespace sbtrain::kernels
