// What the two phases of the stick-breaking backward pass share (sm_90a). They are those of the
// portable loops (mainloop_stickbreaking_backward.cuh), persistent and warp-specialised: one warp
// loads, the other warpgroups compute. Both phases take blocks of 64 keys, and so do the states
// that the first leaves for the second. There are no gates here.
#pragma once

#include "kernels/attention/mainloop_stickbreaking_backward.cuh"
#include "kernels/attention/stickbreaking_tiles_hopper.cuh"

namespace sbtrain::kernels {

using HopperGradients = StickGradients<2, kStickKeys, false>;

struct HopperBackwardArguments {
  StickBreakingProblem p;
  int first_head = 0;         // of the heads that are scheduled
  int* first_keys = nullptr;  // [workspace_heads, T], of each row, from the first phase
  TileScheduler scheduler;
  CUtensorMap q, dout, k, v;  // in phase 1 of tiles of queries, in phase 2 of 64 queries
  __device__ __forceinline__ int* first_key(int head, int row) const {
    return first_keys + static_cast<int64_t>(head - first_head) * p.tokens + row;
  }
  // The place of block `n` of the pack among the states of a row. The blocks that a row sees are at
  // most workspace_blocks neighbours, so each has one of its own, whatever the row's document.
  __device__ __forceinline__ int place(int n) const { return n % p.workspace_blocks; }
  // The states of all rows at a place.
  __device__ __forceinline__ float2* states(int head, int place) const {
    const int64_t slot = static_cast<int64_t>(head - first_head) * p.workspace_blocks + place;
    return reinterpret_cast<float2*>(p.workspace) + slot * p.tokens;
  }
};

}  // namespace sbtrain::kernels
