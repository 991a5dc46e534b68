// Launches the persistent attention kernels (sm_90a).
#pragma once

#include "kernels/attention/launch_attention.h"
#include "kernels/attention/launch_hopper.h"
#include "kernels/attention/tile_queue.cuh"
#include "kernels/attention/tiles_hopper.cuh"
#include "kernels/device_attribute.h"

namespace sbtrain::kernels {

// Runs a kernel of one block for each multiprocessor on the tiles of x.queue, of which tile i takes
// steps(i) steps. Where there are no more tiles than multiprocessors, each has a block of its own,
// and the queue is left out: for short packs, filling it takes as long as a third of the kernel.
template <typename Shape, typename Shared, typename Arguments, typename Steps>
void launch_persistent(const char* name, cudaStream_t stream, void (*kernel)(Arguments),
                       Arguments x, const Steps& steps) {
  const int tiles = x.queue.tiles * x.queue.heads;
  const int blocks = std::min(tiles, multiprocessors());
  if (blocks == tiles) {
    x.queue.order = nullptr;
  } else {
    fill_tile_queue_kernel<<<1, kQueueThreads, 0, stream>>>(x.queue, steps);
    check_launch(name);
  }
  launch_attention(name, stream, kernel, dim3(static_cast<unsigned>(blocks)), Shape::kThreads,
                   kSharedBytes<Shared>, x);
}

}  // namespace sbtrain::kernels
