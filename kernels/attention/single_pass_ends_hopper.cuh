// What runs before and after the main loop of the stick-breaking backward pass in a single pass
// (sm_90a): the states from which its rows start, and the rounding of the sums of dq.
#pragma once

#include "kernels/attention/mainloop_stickbreaking_single_pass_hopper.cuh"

namespace sbtrain::kernels {

// A block of 256 threads for each tile of each head, four for a row: the rows' states and first
// keys, the place that is the first to see the tile, and the first one that is taken.
inline constexpr int kSinglePassBeginThreads = 256;
template <bool kFar = false>
static __global__ void __launch_bounds__(kSinglePassBeginThreads)
    begin_single_pass_kernel(const __grid_constant__ SinglePassArguments x, int keys) {
  const StickBreakingProblem& p = x.p;
  const int tile = static_cast<int>(blockIdx.x);
  const StickHead head(p, x.first_head + static_cast<int>(blockIdx.y));
  const int64_t at = x.tile(head.index, tile);
  const int row_of_tile = static_cast<int>(threadIdx.x) / 4, row = tile * 64 + row_of_tile;
  const bool any = row < end_row<kFar>(p);
  const float log2_rem = any ? p.log2_rem[head.at(row)] : 0.0f;
  StickGradients<1, kStickKeys, false> sticks;
  if constexpr (kFar) {
    sticks.begin(0, log2_rem, any ? p.far.w[head.at(row)] : 0.0f);
  } else {
    sticks.begin(0, log2_rem, whole_remainder_gradient(p, head, row));
  }
  if (threadIdx.x % 4 != 0) return;
  // Where nothing is skipped, all tiles are looked at up to the beginning of their document.
  Visibility seen = visibility_of<true, kFar>(p, head);
  seen.stopped = p.skip_epsilon != 0;
  const int first_key = seen.first_key(row);
  x.states[at * 64 + row_of_tile] = make_float2(sticks.log2_left[0], sticks.c[0]);
  x.first_keys[at * 64 + row_of_tile] = first_key;
  if (row_of_tile > 0) return;
  const int place = first_key / keys;
  x.next[at] = place;
  x.next_dq[at] = place;
  if constexpr (kFar) {
    // Where sticks end early, most places are seen by nobody, and none before the first that is
    // seen is taken. The counter begins with kNothingSeen.
    if (first_key < p.tokens) atomicMin(x.taken, place * x.heads);
  } else {
    if (tile == 0 && blockIdx.y == 0) *x.taken = 0;
  }
}

// A block of 128 threads for each tile of each head: rounds the sums of dq.
inline constexpr int kSinglePassEndThreads = 128;
template <int kD>
static __global__ void __launch_bounds__(kSinglePassEndThreads)
    end_single_pass_kernel(const __grid_constant__ SinglePassArguments x) {
  const StickBreakingProblem& p = x.p;
  const int tile = static_cast<int>(blockIdx.x);
  const StickHead head(p, x.first_head + static_cast<int>(blockIdx.y));
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16;
  const int first = tile * 64 + warp_row;
  WarpgroupAccumulator<kD> dq;
  load_sums(dq, x.dq + int64_t{x.tile(head.index, tile)} * (64 * kD) + warp_row * kD);
  const float scale = p.scale * p.query_factor;
  store_rows(head.row(p.dq, first), p.dq.stride, p.tokens - first, kD, dq,
             [scale](int) { return scale; });
}

// The same for keys of another rank: adds the sums of dq, where a key was read, and W_far becomes
// what the rows' states at the right of all keys say.
template <int kD>
static __global__ void __launch_bounds__(kSinglePassEndThreads)
    end_far_single_pass_kernel(const __grid_constant__ SinglePassArguments x) {
  const StickBreakingProblem& p = x.p;
  const int tile = static_cast<int>(blockIdx.x);
  const StickHead head(p, x.first_head + static_cast<int>(blockIdx.y));
  const int64_t at = x.tile(head.index, tile);
  const int row_of_tile = static_cast<int>(threadIdx.x), row = tile * 64 + row_of_tile;
  if (row_of_tile < 64 && row < p.far.queries) {
    p.far.w[head.at(row)] =
        gradient_of_found(x.states[at * 64 + row_of_tile].y, p.far.before[head.at(row)]);
  }
  if (x.first_keys[at * 64] >= p.tokens) return;
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16, first = tile * 64 + warp_row;
  WarpgroupAccumulator<kD> dq;
  load_sums(dq, x.dq + at * (64 * kD) + warp_row * kD);
  const float scale = p.scale * p.query_factor;
  add_rows(sum_row(head, p.far.dq, first), p.far.dq.stride, p.far.queries - first, p.head_dim, dq,
           [scale](int) { return scale; });
}

// A block of 128 threads for each block of 64 keys of each head of keys: dk and dv, in the order of
// the heads of queries.
template <int kD>
static __global__ void __launch_bounds__(kSinglePassEndThreads)
    add_groups_kernel(const __grid_constant__ SinglePassArguments x) {
  const StickBreakingProblem& p = x.p;
  const int block = static_cast<int>(blockIdx.x) * kStickKeys;
  const int key_head = x.first_head / p.group + static_cast<int>(blockIdx.y);
  WarpgroupAccumulator<kD> sums[2];
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    sums[which].clear();
#pragma unroll 1
    for (int n = 0; n < p.group; ++n) {
      add_sums(sums[which], x.sums_of<kD>(key_head * p.group + n, block, which));
    }
  }
  write_key_gradients<kD>(p, key_head, sums[0], sums[1], block,
                          first_loaded_key<kStickKeys>(block, p.tokens));
}

}  // namespace sbtrain::kernels
