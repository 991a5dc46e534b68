// What the two phases of the stick-breaking backward pass share (sm_90a). They are those of the
// portable loops (mainloop_stickbreaking_backward.cuh), persistent and warp-specialised: one warp
// loads, the other warpgroups compute. Both phases take blocks of 64 keys. The first leaves a state
// for each lane's 16 keys of a block, so that the lanes of the second exchange nothing. There are
// no gates here.
#pragma once

#include "kernels/attention/mainloop_stickbreaking_backward.cuh"
#include "kernels/attention/scratch_sizes.h"
#include "kernels/attention/stickbreaking_tiles_hopper.cuh"

namespace sbtrain::kernels {

using HopperGradients = StickGradients<2, kStickKeys, false>;

// The states of 64 rows in a block of keys: of row i of each thread of the warpgroup that has them.
struct alignas(16) TileStates {
  HopperGradients::LaneState of_row[2][128];
};
static_assert(sizeof(TileStates) == 64 * kHopperRowStateBytes);

struct HopperBackwardArguments {
  StickBreakingProblem p;
  int first_head = 0;         // of the heads that are scheduled
  int rows = 0;               // of the states and first keys of a head: T, in whole tiles
  int* first_keys = nullptr;  // [workspace_heads, rows], from the first phase
  TileScheduler scheduler;
  CUtensorMap q, dout, k, v;  // in phase 1 of tiles of queries, in phase 2 of 64 queries
  __device__ __forceinline__ int* first_key(int head, int row) const {
    return first_keys + static_cast<int64_t>(head - first_head) * rows + row;
  }
  // The place of block `n` of the pack among the states of a row. The blocks that a row sees are at
  // most workspace_blocks neighbours, so each has one of its own, whatever the row's document.
  __device__ __forceinline__ int place(int n) const { return n % p.workspace_blocks; }
  // The states of the 64 rows from `row` on, at a place.
  __device__ __forceinline__ TileStates* states(int head, int place, int row) const {
    const int64_t slot = static_cast<int64_t>(head - first_head) * p.workspace_blocks + place;
    return reinterpret_cast<TileStates*>(p.workspace) + slot * (rows / 64) + row / 64;
  }
};

}  // namespace sbtrain::kernels
