// The tile scheduler: in which order the blocks of a persistent kernel take the tiles of all heads.
// Long ones come first, so that all blocks end at about the same time, but only of a few heads at a
// time, so that what these heads read again and again stays in the L2 cache. Where each tile has a
// multiprocessor of its own there is no order to keep, and nothing to prepare.
#pragma once

#include <cstdint>

#include "kernels/attention/tile_scheduler.h"

namespace sbtrain::kernels {

// Puts the tiles in order: tile i takes length(i) steps, a number > 0.
inline constexpr int kSchedulerThreads = 1024;
template <typename Length>
static __global__ void __launch_bounds__(kSchedulerThreads)
    schedule_tiles_kernel(const TileScheduler scheduler, const Length length) {
  __shared__ int longest;
  __shared__ int places[kSchedulerThreads];  // number of tiles of each bin, the longest in bin 0
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) longest = 1, *scheduler.taken = 0;
  places[thread] = 0;
  __syncthreads();
  int mine = 1;
  for (int i = thread; i < scheduler.tiles; i += kSchedulerThreads) mine = max(mine, length(i));
  atomicMax(&longest, mine);
  __syncthreads();
  const auto bin = [&](int i) {
    const auto steps = static_cast<int64_t>(longest - length(i));
    return static_cast<int>(steps * (kSchedulerThreads - 1) / longest);
  };
  for (int i = thread; i < scheduler.tiles; i += kSchedulerThreads) atomicAdd(&places[bin(i)], 1);
  __syncthreads();
  const int count = places[thread];
  for (int step = 1; step < kSchedulerThreads; step *= 2) {
    const int before = thread >= step ? places[thread - step] : 0;
    __syncthreads();
    places[thread] += before;
    __syncthreads();
  }
  places[thread] -= count;  // the first place of the bin
  __syncthreads();
  for (int i = thread; i < scheduler.tiles; i += kSchedulerThreads) {
    scheduler.order[atomicAdd(&places[bin(i)], 1)] = i;
  }
}

struct ScheduledTile {
  int tile, head;  // tile < 0: there are no more
};

// Takes the next tile of the block. By one thread. `again` says that the block has taken one
// before, which matters only where no block takes two.
__device__ __forceinline__ ScheduledTile next_tile(const TileScheduler& scheduler, bool again) {
  const int tiles = scheduler.tiles * scheduler.heads;
  int n = again ? tiles : static_cast<int>(blockIdx.x);
  if (scheduler.order) n = atomicAdd(scheduler.taken, 1);
  if (n >= tiles) return {-1, 0};
  const int first_head =
      n / (scheduler.tiles * scheduler.heads_at_a_time) * scheduler.heads_at_a_time;
  const int heads = min(scheduler.heads_at_a_time, scheduler.heads - first_head);
  const int place = n - scheduler.tiles * first_head;
  int tile = place / heads;
  if (scheduler.order) tile = scheduler.order[tile];
  return {tile, first_head + place % heads};
}

// The same by a warp, all of whose lanes get the tile.
__device__ __forceinline__ ScheduledTile next_tile_of_warp(const TileScheduler& scheduler,
                                                           bool again) {
  ScheduledTile next{};
  if (threadIdx.x % 32 == 0) next = next_tile(scheduler, again);
  return {__shfl_sync(~0u, next.tile, 0), __shfl_sync(~0u, next.head, 0)};
}

}  // namespace sbtrain::kernels
