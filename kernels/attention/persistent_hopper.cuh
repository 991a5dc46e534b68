// The kernel that runs all warp-specialised main loops of attention (sm_90a), built like
// flash_fwd_kernel of FlashAttention-3 and the collectives of CUTLASS. Its blocks are persistent:
// they take tiles from the scheduler until none is left. One warp of a block, the producer, tells
// the others which tile it has taken and loads what the tile needs; the other warpgroups, the
// consumers, compute. They pass the tile on as they pass all else, through a pipeline, of one
// stage.
//
// A main loop is a type with these members:
//
//   Shape      kThreads of a block, kConsumers of 128 each, and the registers of a thread:
//              kProducerRegisters and kConsumerRegisters
//   Arguments  what the kernel is given: `p`, the problem, `scheduler` and what else it needs;
//              prefetch(arguments), where there is one, fetches descriptors before the first tile
//              needed(arguments), where there is one, says whether the launch has anything to do
//   Shared     the layout of shared memory: Pipeline<1> `tiles`, `tile`, of type QueryTile or
//              KeyTile, and what else it needs; init(), by one thread, makes the barriers
//   Producer   of (shared, arguments), one warp: tile_of(tile, head) describes a scheduled tile,
//              load(tile) loads all of it
//   Consumer   of (shared, arguments, index), a warpgroup: compute(tile)
//   kTileRows  the queries or keys of a tile, and steps(p) or steps(arguments), how long each takes
//              (schedule_tiles_kernel)
//
// Producer and Consumer derive from TileState, or have its functions.
#pragma once

#include <cstdint>

#include "kernels/attention/tile_scheduler.cuh"
#include "kernels/primitives/pipeline.cuh"
#include "kernels/primitives/warpgroup.cuh"

namespace sbtrain::kernels {

// A tile of queries and the blocks of keys that they see.
struct QueryTile {
  int first = -1;           // query; < 0: there are no more tiles
  int head = 0;             // of queries
  int begin = 0, last = 0;  // the first block of keys and the last one
};
__device__ __forceinline__ QueryTile uniform(const QueryTile& tile) {
  return {uniform(tile.first), uniform(tile.head), uniform(tile.begin), uniform(tile.last)};
}

// A tile of keys.
struct KeyTile {
  int first = -1;  // key; < 0: there are no more tiles
  int head = 0;    // of keys
};
__device__ __forceinline__ KeyTile uniform(const KeyTile& tile) {
  return {uniform(tile.first), uniform(tile.head)};
}

// How many warps read what the producer loads for all consumers.
template <typename Shape>
inline constexpr int kReaders = 4 * Shape::kConsumers;

// Where a producer or a consumer stands among the tiles of its block. What is loaded once a tile
// has a pipeline of one stage, and the same state.
class TileState {
 public:
  __device__ __forceinline__ PipelineState<1> tile_state() const { return tile_state_; }
  __device__ __forceinline__ void advance_tile() { tile_state_.advance(); }

 private:
  PipelineState<1> tile_state_;
};

// The layout kernels see of their dynamic shared memory, aligned as wgmma requires. It takes
// kSharedAlignment bytes more than the layout has.
inline constexpr int kSharedAlignment = 1024;
template <typename Layout>
inline constexpr int kSharedBytes = static_cast<int>(sizeof(Layout)) + kSharedAlignment;
template <typename Layout>
__device__ __forceinline__ Layout& aligned_shared(unsigned char* memory) {
  const uint32_t address = shared_address(memory);
  const uint32_t offset = (kSharedAlignment - address % kSharedAlignment) % kSharedAlignment;
  return *reinterpret_cast<Layout*>(memory + offset);
}

// Whether the registers that a block has when it starts, __launch_bounds__(Shape::kThreads, 1), are
// enough for those that its producer and its consumers set. If not, setmaxnreg_increase() never
// returns.
template <typename Shape>
inline constexpr bool kRegistersSuffice = Shape::kProducerRegisters +
                                              Shape::kConsumers* Shape::kConsumerRegisters <=
                                          (Shape::kConsumers + 1) *
                                              (65536 / Shape::kThreads / 8 * 8);

// How long each tile takes.
template <typename Mainloop>
auto steps_of(const typename Mainloop::Arguments& x) {
  if constexpr (requires { Mainloop::steps(x.p); }) {
    return Mainloop::steps(x.p);
  } else {
    return Mainloop::steps(x);
  }
}

template <typename Mainloop>
__device__ __forceinline__ void produce_tiles(typename Mainloop::Shared& shared,
                                              const typename Mainloop::Arguments& x) {
  typename Mainloop::Producer producer(shared, x);
  for (;;) {
    const auto [index, head] = next_tile_of_warp(x.scheduler, producer.tile_state().parity() != 0);
    decltype(shared.tile) tile;
    if (index >= 0) tile = producer.tile_of(index, head);
    Mbarrier& full = shared.tiles.acquire(producer.tile_state());
    if (lane() == 0) {
      shared.tile = tile;
      full.arrive();
    }
    if (tile.first < 0) return;
    producer.load(tile);
    producer.advance_tile();
  }
}

template <typename Mainloop>
__device__ __forceinline__ void consume_tiles(typename Mainloop::Shared& shared,
                                              const typename Mainloop::Arguments& x, int index) {
  typename Mainloop::Consumer consumer(shared, x, index);
  for (;;) {
    shared.tiles.wait(consumer.tile_state());
    const auto tile = uniform(shared.tile);
    shared.tiles.release();
    if (tile.first < 0) return;
    consumer.compute(tile);
    consumer.advance_tile();
  }
}

template <typename Mainloop>
static __global__ void __launch_bounds__(Mainloop::Shape::kThreads, 1)
    persistent_hopper_kernel(const __grid_constant__ typename Mainloop::Arguments x) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if constexpr (requires { Mainloop::needed(x); }) {
    if (!Mainloop::needed(x)) return;
  }
  using Shape = typename Mainloop::Shape;
  static_assert(kRegistersSuffice<Shape>);
  extern __shared__ unsigned char memory[];
  auto& shared = aligned_shared<typename Mainloop::Shared>(memory);
  if (threadIdx.x == 0) {
    shared.init();
    fence_mbarrier_init();
    if constexpr (requires { Mainloop::prefetch(x); }) Mainloop::prefetch(x);
  }
  __syncthreads();
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / 128);
  if (warpgroup == 0) {
    setmaxnreg_decrease<Shape::kProducerRegisters>();
    if (threadIdx.x < 32) produce_tiles<Mainloop>(shared, x);
  } else {
    setmaxnreg_increase<Shape::kConsumerRegisters>();
    consume_tiles<Mainloop>(shared, x, warpgroup - 1);
  }
#else
  __trap();  // the build has no code for this GPU: CMAKE_CUDA_ARCHITECTURES lacks 90a
#endif
}

}  // namespace sbtrain::kernels
