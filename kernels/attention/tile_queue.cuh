// The order in which the blocks of a persistent kernel take the tiles of all heads: long ones
// first, so that all blocks end at about the same time, but only of a few heads at a time, so that
// what these heads read again and again stays in the L2 cache. Where each tile has a multiprocessor
// of its own there is no order to keep, and nothing to fill.
#pragma once

#include <cstdint>

#include "kernels/attention/tile_queue.h"

namespace sbtrain::kernels {

// Fills the queue: tile i takes length(i) steps, a number > 0.
inline constexpr int kQueueThreads = 1024;
template <typename Length>
static __global__ void __launch_bounds__(kQueueThreads)
    fill_tile_queue_kernel(const TileQueue queue, const Length length) {
  __shared__ int longest;
  __shared__ int places[kQueueThreads];  // number of tiles of each bin, the longest in bin 0
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) longest = 1, *queue.taken = 0;
  places[thread] = 0;
  __syncthreads();
  int mine = 1;
  for (int i = thread; i < queue.tiles; i += kQueueThreads) mine = max(mine, length(i));
  atomicMax(&longest, mine);
  __syncthreads();
  const auto bin = [&](int i) {
    const auto steps = static_cast<int64_t>(longest - length(i));
    return static_cast<int>(steps * (kQueueThreads - 1) / longest);
  };
  for (int i = thread; i < queue.tiles; i += kQueueThreads) atomicAdd(&places[bin(i)], 1);
  __syncthreads();
  const int count = places[thread];
  for (int step = 1; step < kQueueThreads; step *= 2) {
    const int before = thread >= step ? places[thread - step] : 0;
    __syncthreads();
    places[thread] += before;
    __syncthreads();
  }
  places[thread] -= count;  // the first place of the bin
  __syncthreads();
  for (int i = thread; i < queue.tiles; i += kQueueThreads) {
    queue.order[atomicAdd(&places[bin(i)], 1)] = i;
  }
}

struct QueuedTile {
  int tile, head;  // tile < 0: there are no more
};

// Takes the next tile. By one thread. `again` says that the block has taken one before, which
// matters only where no block takes two.
__device__ __forceinline__ QueuedTile take_tile(const TileQueue& queue, bool again) {
  const int tiles = queue.tiles * queue.heads;
  int n = again ? tiles : static_cast<int>(blockIdx.x);
  if (queue.order) n = atomicAdd(queue.taken, 1);
  if (n >= tiles) return {-1, 0};
  const int first_head = n / (queue.tiles * queue.heads_at_a_time) * queue.heads_at_a_time;
  const int heads = min(queue.heads_at_a_time, queue.heads - first_head);
  const int place = n - queue.tiles * first_head;
  int tile = place / heads;
  if (queue.order) tile = queue.order[tile];
  return {tile, first_head + place % heads};
}

// The same by a warp, all of whose lanes get the tile.
__device__ __forceinline__ QueuedTile take_tile_by_warp(const TileQueue& queue, bool again) {
  QueuedTile next{};
  if (threadIdx.x % 32 == 0) next = take_tile(queue, again);
  return {__shfl_sync(~0u, next.tile, 0), __shfl_sync(~0u, next.head, 0)};
}

}  // namespace sbtrain::kernels
