// Stick-breaking attention forward: a tile of queries walks over its keys from right to left, until
// the first one of its document or until its sticks are used up.
#pragma once

#include "kernels/attention/epilogue.cuh"
#include "kernels/attention/score_stickbreaking_forward.cuh"
#include "kernels/attention/stickbreaking_tiles.cuh"

namespace sbtrain::kernels {

template <int kD>
constexpr int stick_forward_shared_bytes() {
  return 2 * kD * StickShape<kD, StickPass::kForward>::kQueries + KeyStages<kD, true>::kBytes;
}

// Whether all of the lane's sticks are shorter than epsilon, or have no key left of `block`.
template <int kRows, int kKeys, bool kGated, typename Seen>
__device__ __forceinline__ bool used_up(const Sticks<kRows, kKeys, kGated>& sticks,
                                        const Seen& seen, int block, float epsilon) {
  bool done = true;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    done = done && (sticks.left[i] < epsilon || seen.begin[i] >= block);
  }
  return done;
}

// o_j += rem_j * (v_j or r_h).
template <int kRowBlocks, int kD>
__device__ __forceinline__ void add_remainder(Accumulator<kRowBlocks, kD / 8>& o,
                                              const StickBreakingProblem& p, const StickHead& head,
                                              int first, const float* left) {
  o.for_each([&](float& x, auto at) {
    const int row = first + at.row;
    if (row >= p.tokens || at.col >= p.head_dim) return;
    x += left[at.lane_row] * __bfloat162float(remainder_row(p, head, row)[at.col]);
  });
}

// Sets the sticks of the lane's rows to what nearer keys have left.
template <int kRows, int kKeys, bool kGated>
__device__ __forceinline__ void bring_sticks(Sticks<kRows, kKeys, kGated>& sticks,
                                             const StickBreakingProblem& p, const StickHead& head,
                                             int first) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = first + lane_row() + 8 * i;
    const float log2_left = row < p.far.queries ? p.far.before[head.at(row)] : 0.0f;
    sticks.left[i] = exp2_ftz(log2_left);
    sticks.log2_left[i] = quad_lane() == 0 ? log2_left : 0.0f;
  }
}

// Whether the stick of a row came used up, or the row sees none of the keys.
__device__ __forceinline__ bool row_came_used_up(const StickBreakingProblem& p,
                                                 const StickHead& head, int row) {
  return p.skip_epsilon > 0 &&
         (row >= p.far.queries || exp2_ftz(p.far.before[head.at(row)]) < p.skip_epsilon);
}

// Whether the sticks of all of the lane's rows came used up. Read again after the loop over keys,
// in which there is no register for it.
template <int kRows>
__device__ __forceinline__ bool came_used_up(const StickBreakingProblem& p, const StickHead& head,
                                             int first) {
  bool done = true;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    done = done && row_came_used_up(p, head, first + lane_row() + 8 * i);
  }
  return done;
}

// Of rows whose sticks came used up: they take nothing from the keys, of which they count as having
// read none, so that the backward pass does not look at their tile for the gradients of keys.
template <int kRows>
__device__ __forceinline__ void write_used_up(const StickBreakingProblem& p, const StickHead& head,
                                              int first) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = first + lane_row() + 8 * i;
    if (row >= p.far.queries || quad_lane() != 0) continue;
    p.log2_rem[head.at(row)] = p.far.before[head.at(row)];
    p.stop[head.at(row)] = p.tokens - p.far.key;
  }
}

// Writes o, the remainders and the stops: of each row the keys from `block` on have been read.
template <int kRowBlocks, int kD, bool kFar = false, int kKeys, bool kGated, typename Seen>
__device__ __forceinline__ void write_sticks(const StickBreakingProblem& p, const StickHead& head,
                                             int first, int block,
                                             Accumulator<kRowBlocks, kD / 8>& o, const Seen& seen,
                                             const Sticks<2 * kRowBlocks, kKeys, kGated>& sticks) {
  const auto whole = [](int) { return 1.0f; };
  if constexpr (kFar) {
    add_rows(sum_row(head, p.far.o, first), p.far.o.stride, p.far.queries - first, p.head_dim, o,
             whole);
  } else {
    if (p.remainder != StickRemainder::kNone) {
      add_remainder<kRowBlocks, kD>(o, p, head, first, sticks.left);
    }
    store_rows(head.row(p.o, first), p.o.stride, p.tokens - first, p.head_dim, o, whole);
  }
#pragma unroll
  for (int i = 0; i < 2 * kRowBlocks; ++i) {
    const float log2_left = quad_sum(sticks.log2_left[i]);
    const int row = first + lane_row() + 8 * i;
    if (row >= end_row<kFar>(p) || quad_lane() != 0) continue;
    p.log2_rem[head.at(row)] = log2_left;
    p.stop[head.at(row)] = max(0, block - seen.begin[i]);
  }
}

template <int kD, bool kGated, bool kFar = false>
static __global__ void __launch_bounds__(StickThreads::kThreads,
                                         StickShape<kD, StickPass::kForward>::kBlocks)
    stick_forward_kernel(const StickBreakingProblem p) {
  using Shape = StickShape<kD, StickPass::kForward>;
  constexpr int kRowBlocks = Shape::kRowBlocks;
  constexpr int kQueries = Shape::kQueries;
  extern __shared__ __align__(128) unsigned char memory[];
  auto* q_tile = reinterpret_cast<__nv_bfloat16*>(memory);
  using Keys = KeyStages<kD, kGated>;
  const Keys keys(q_tile + kQueries * kD);

  const StickThreads group;
  const StickHead head = head_of_block(p);
  // Later tiles usually have more keys, so they start first.
  const int tile = static_cast<int>(gridDim.x - 1 - blockIdx.x) * kQueries;
  const int warp_row = group.warp() * Shape::kWarpRows;
  const int first = tile + warp_row;
  const Visibility visibility = visibility_of<false, kFar>(p, head);
  const RowKeys<kRowBlocks> seen(visibility, first);
  const int lowest = visibility.first_key(tile) / kStickKeys * kStickKeys;
  const int last = (end_key_of_rows<kFar>(p, tile + kQueries) - 1) / kStickKeys * kStickKeys;
  const float scale_log2 = p.scale * kLog2e;

  load_rows<kQueries, kD>(group, q_tile, head, p.q, tile);
  keys.load(group, p, head, last, 0);
  TileRows<kRowBlocks, kD, (kD <= 64)> queries(q_tile, warp_row);
  Sticks<2 * kRowBlocks, kStickKeys, kGated> sticks;
  if constexpr (kFar) bring_sticks(sticks, p, head, first);
  Accumulator<kRowBlocks, kD / 8> o;
  o.clear();
  int block = last;
  for (int stage = 0;; stage ^= Keys::kStages - 1, block -= kStickKeys) {
    if (Keys::kStages == 1 && block < last) {
      group.sync();  // the block before has been read
      keys.load(group, p, head, block, stage);
    }
    cp_async_wait<0>();
    group.sync();
    if (block == last) queries.load();
    if (Keys::kStages > 1 && block > lowest)
      keys.load(group, p, head, block - kStickKeys, stage ^ 1);
    if (seen.some(block, kStickKeys)) {
      Accumulator<kRowBlocks, kStickKeys / 8> s;
      product_with_rows(s, queries, keys.k(stage));
      sticks.score(s, block, scale_log2, seen, keys.gates(stage));
      add_product<kRowBlocks, kStickKeys / 8, kD>(o, s, keys.v(stage));
    }
    if (block <= lowest) break;
    if (p.skip_epsilon > 0 && group.all(used_up(sticks, seen, block, p.skip_epsilon))) break;
  }
  cp_async_wait<0>();
  if constexpr (kFar) {
    constexpr int kRows = 2 * kRowBlocks;
    if (group.all(came_used_up<kRows>(p, head, first))) return write_used_up<kRows>(p, head, first);
  }
  write_sticks<kRowBlocks, kD, kFar>(p, head, first, block, o, seen, sticks);
}

}  // namespace sbtrain::kernels
