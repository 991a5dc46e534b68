// Launches the persistent attention kernels (sm_90a).
#pragma once

#include <type_traits>

#include "kernels/attention/launch_attention.h"
#include "kernels/attention/launch_hopper.h"
#include "kernels/attention/persistent_hopper.cuh"
#include "kernels/device_attribute.h"

namespace sbtrain::kernels {

// Runs a main loop whose tiles have been put in order.
template <typename Mainloop>
void launch_scheduled(const char* name, cudaStream_t stream,
                      const typename Mainloop::Arguments& x) {
  const int blocks = std::min(x.scheduler.tiles * x.scheduler.heads, multiprocessors());
  launch_attention(name, stream, persistent_hopper_kernel<Mainloop>,
                   dim3(static_cast<unsigned>(blocks)), Mainloop::Shape::kThreads,
                   kSharedBytes<typename Mainloop::Shared>, x);
}

// Runs a main loop (persistent_hopper.cuh) on all tiles of `rows` rows and `heads` heads, of
// queries or, where it has tiles of keys, of keys, with one
// block for each multiprocessor. `scratch` is that of the scheduler. Where there are no more tiles
// than multiprocessors, each has a block of its own, and nothing is put in order: for short packs
// that takes as long as a third of the kernel.
template <typename Mainloop>
void launch_persistent(const char* name, cudaStream_t stream, typename Mainloop::Arguments x,
                       int rows, int heads, void* scratch) {
  const int tiles = static_cast<int>(ceil_div(rows, Mainloop::kTileRows));
  const int blocks = std::min(tiles * heads, multiprocessors());
  constexpr bool kOfKeys = std::is_base_of_v<KeyTile, decltype(Mainloop::Shared::tile)>;
  x.scheduler = tile_scheduler(x.p, heads, tiles, scratch, kOfKeys);
  if (blocks == tiles * heads) {
    x.scheduler.order = nullptr;
  } else {
    schedule_tiles_kernel<<<1, kSchedulerThreads, 0, stream>>>(x.scheduler, steps_of<Mainloop>(x));
    check_launch(name);
  }
  launch_scheduled<Mainloop>(name, stream, x);
}
template <typename Mainloop>
void launch_persistent(const char* name, cudaStream_t stream, typename Mainloop::Arguments x,
                       int heads, void* scratch) {
  launch_persistent<Mainloop>(name, stream, x, x.p.tokens, heads, scratch);
}

}  // namespace sbtrain::kernels
