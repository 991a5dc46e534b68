// A pipeline of stages in shared memory, which a producer fills and consumers read: each stage has
// an mbarrier that says it is full and one that says it is empty, and both sides walk over the
// stages in the same order, round and round.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/primitives/lanes.cuh"
#include "kernels/primitives/mbarrier.cuh"

namespace sbtrain::kernels {

// Where one side stands in a pipeline: the stage, and how often it has been round.
template <int kStages>
struct PipelineState {
  // Of two numbers in one register the lower has as many values as the next power of two, so that
  // neither takes a division.
  static constexpr uint32_t kValues = std::bit_ceil(static_cast<uint32_t>(kStages));
  uint32_t passed = 0;
  __device__ __forceinline__ int stage() const { return static_cast<int>(passed % kValues); }
  // The parity of the phase in which the stage is filled.
  __device__ __forceinline__ uint32_t parity() const { return passed / kValues & 1; }
  __device__ __forceinline__ void advance() {
    ++passed;
    if (stage() == kStages) passed += kValues - static_cast<uint32_t>(kStages);
  }
};

// Of a single stage the parity is all there is to know.
template <>
struct PipelineState<1> {
  uint32_t phase = 0;
  __device__ __forceinline__ int stage() const { return 0; }
  __device__ __forceinline__ uint32_t parity() const { return phase; }
  __device__ __forceinline__ void advance() { phase ^= 1; }
};

// One lane of the warp arrives, after all of its lanes.
__device__ __forceinline__ void arrive_as_warp(Mbarrier& barrier) {
  __syncwarp();
  if (lane() == 0) barrier.arrive();
}

template <int kStages>
struct Pipeline {
  using State = PipelineState<kStages>;
  Mbarrier full[kStages], empty[kStages];

  // By one thread. A stage is full after `fills` arrivals, and empty after one of each of the
  // `warps` that read it.
  __device__ __forceinline__ void init(int fills, int warps) {
    for (int i = 0; i < kStages; ++i) {
      full[i].init(fills);
      empty[i].init(warps);
    }
  }

  // The producer: waits until the stage may be filled. What it arrives at then is the result.
  __device__ __forceinline__ Mbarrier& acquire(const State& state) {
    empty[state.stage()].wait(state.parity() ^ 1);
    return full[state.stage()];
  }
  // A consumer: waits until the stage is filled.
  __device__ __forceinline__ void wait(const State& state) {
    full[state.stage()].wait(state.parity());
  }
  // A warp of a consumer has read the stage.
  __device__ __forceinline__ void release(int stage = 0) { arrive_as_warp(empty[stage]); }
  __device__ __forceinline__ void release_and_advance(State& state) {
    release(state.stage());
    state.advance();
  }
};

}  // namespace sbtrain::kernels
