// What the warp-specialised main loops of softmax attention share (sm_90a), for any score function
// (score_scaled.cuh).
#pragma once

#include "kernels/attention/coordinates.cuh"
#include "kernels/attention/softmax_tiles.cuh"
#include "kernels/attention/tiles_hopper.cuh"

namespace sbtrain::kernels {

// Whether the score function stages numbers beside the keys, for tiles of any shape.
struct AnyQueryTiles {
  static constexpr int kRowBlocks = 1, kQueries = 128, kKeys = 64;
};
template <typename Policy>
inline constexpr bool kStagesScores = (Policy::template QueryRows<AnyQueryTiles>::stage_bytes()) >
                                      0;

// Tiles of queries, and the blocks of keys over which they walk.
template <int kHeadDim, int kWarpgroups, int kBlockKeys, int kBlocksLoaded>
struct HopperSoftmaxTiles {
  static constexpr int kD = kHeadDim;
  static constexpr int kRowBlocks = 1;  // of 16 queries, each warp
  static constexpr int kKeys = kBlockKeys;
  static constexpr int kConsumers = kWarpgroups;
  static constexpr int kQueries = 64 * kConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kStages = kBlocksLoaded;
};
// Narrow heads leave registers for a third consumer, unless the score takes them.
template <int kHeadDim, int kBlockKeys, int kBlocksLoaded, typename Policy>
using HopperSoftmaxTilesOf =
    HopperSoftmaxTiles<kHeadDim, (kHeadDim <= 64 && !kStagesScores<Policy>) ? 3 : 2, kBlockKeys,
                       kBlocksLoaded>;

template <int kHeadDim, int kBlockKeys, int kBlocksLoaded, typename Policy>
struct HopperSoftmaxShape : HopperSoftmaxTilesOf<kHeadDim, kBlockKeys, kBlocksLoaded, Policy> {
  using Tiles = HopperSoftmaxTilesOf<kHeadDim, kBlockKeys, kBlocksLoaded, Policy>;
  using Scores = typename Policy::template QueryRows<Tiles>;
  static constexpr bool kStaged = kStagesScores<Policy>;
  static constexpr int kProducerRegisters = kStaged ? 40 : 24;
  static constexpr int kConsumerRegisters = Tiles::kConsumers == 3 ? 160 : kStaged ? 232 : 240;
};

// The score of a loop over the keys of another rank (SoftmaxFarProblem).
template <typename Policy>
struct FarScore : Policy {};
template <typename Policy>
struct ProblemOfScore {
  using Type = SoftmaxProblem;
};
template <typename Policy>
struct ProblemOfScore<FarScore<Policy>> {
  using Type = SoftmaxFarProblem;
};
template <typename Policy>
using ProblemOf = typename ProblemOfScore<Policy>::Type;

template <typename Policy>
struct HopperSoftmaxArguments {
  ProblemOf<Policy> p;
  Policy policy;
  float* delta_HT = nullptr;  // backward
  TileScheduler scheduler;
  CUtensorMap q, k, v, dout;  // dout: backward
};

// The tile of kQueries queries that begins at `first`, with blocks of kKeys keys. Where all of them
// lie beyond the pack, the blocks are those of its last query.
template <int kQueries, int kKeys>
__device__ __forceinline__ QueryTile tile_of_queries(const SoftmaxProblem& p, int first, int head) {
  const int end = min(first + kQueries, p.tokens);
  return {first, head, visibility_of(p).first_key(first) / kKeys * kKeys,
          (end - 1) / kKeys * kKeys};
}

// Keys of another rank end where their tensor does. A tile to which a window hides all of them
// looks at the last block.
template <int kQueries, int kKeys>
__device__ __forceinline__ QueryTile tile_of_queries(const SoftmaxFarProblem& p, int first,
                                                     int head) {
  const int last = (p.tokens - 1) / kKeys * kKeys;
  const int begin = visibility_of(p).first_key(min(first, p.queries - 1)) / kKeys * kKeys;
  return {first, head, min(begin, last), last};
}

// The number of blocks of keys that a tile of queries walks over.
template <int kQueries, int kKeys, typename Problem = SoftmaxProblem>
struct SoftmaxQuerySteps {
  Problem p;
  __device__ int operator()(int tile) const {
    const QueryTile t = tile_of_queries<kQueries, kKeys>(p, tile * kQueries, 0);
    return (t.last - t.begin) / kKeys + 1;
  }
};

// All queries that see a key of the tile of kKeys keys come before this one.
template <int kKeys, typename Problem>
__device__ __forceinline__ int end_query_of_keys(const Problem& p, int first) {
  return visibility_of(p).end_query(min(first + kKeys, p.tokens) - 1);
}

// The number of tiles of queries that a tile of keys walks over.
template <int kKeys, int kQueries, typename Problem = SoftmaxProblem>
struct SoftmaxKeySteps {
  Problem p;
  __device__ int operator()(int tile) const {
    if constexpr (kIsFar<Problem>) return max(1, (p.queries + kQueries - 1) / kQueries);
    const int first = tile * kKeys;
    return (end_query_of_keys<kKeys>(p, first) - first + kQueries - 1) / kQueries;
  }
};

// Scores of the block of keys that the lane's rows do not see become `hidden`.
template <bool kFar, int kKeys>
__device__ __forceinline__ void mask(WarpgroupAccumulator<kKeys>& s, const TileRowKeys& seen,
                                     int block, float hidden) {
  const bool all = block >= seen.last_begin && block + kKeys <= seen.first_end;
  if (__all_sync(~0u, all)) return;      // a vote tells the compiler that the lanes stay together
  const int first = block + lane_col();  // the keys are counted from the lane's first one
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int begin = seen.begin[i] - first, end = seen.end + (kFar ? 0 : 8 * i) - first;
#pragma unroll
    for (int c = 0; c < kKeys / 8; ++c) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int key = 8 * c + odd;
        if (key < begin || key >= end) s.at[0][c][2 * i + odd] = hidden;
      }
    }
  }
}

}  // namespace sbtrain::kernels
