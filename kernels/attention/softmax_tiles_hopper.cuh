// What the warp-specialised main loops of softmax attention share (sm_90a), for any score function
// (score_scaled.cuh).
#pragma once

#include "kernels/attention/coordinates.cuh"
#include "kernels/attention/softmax_tiles.cuh"
#include "kernels/attention/tile_queue.cuh"
#include "kernels/attention/tiles_hopper.cuh"

namespace sbtrain::kernels {

// Whether the score function stages numbers beside the keys, for tiles of any shape.
struct AnyQueryTiles {
  static constexpr int kRowBlocks = 1, kQueries = 128, kKeys = 64;
};
template <typename Policy>
inline constexpr bool kStagesScores = (Policy::template QueryRows<AnyQueryTiles>::stage_bytes()) >
                                      0;

template <typename Policy>
struct HopperSoftmaxArguments {
  SoftmaxProblem p;
  Policy policy;
  float* delta_HT = nullptr;  // backward
  TileQueue queue;
  CUtensorMap q, k, v, dout;  // dout: backward
};

// Tells the consumers which tile the producer has taken for the block.
struct SoftmaxTile {
  int first;  // query, or key where keys own the tile; < 0: there are no more tiles
  int head;
  int begin, last;  // where queries own the tile: the first and the last block of keys
};

// The tile of kQueries queries that begins at `first`, with blocks of kKeys keys. Where all of them
// lie beyond the pack, the blocks are those of its last query.
template <int kQueries, int kKeys>
__device__ __forceinline__ SoftmaxTile tile_of_queries(const SoftmaxProblem& p, int first,
                                                       int head) {
  const int end = min(first + kQueries, p.tokens);
  return {first, head, visibility_of(p).first_key(first) / kKeys * kKeys,
          (end - 1) / kKeys * kKeys};
}

// Takes a tile of queries from the queue, `again` as for take_tile. By a warp.
template <int kQueries, int kKeys>
__device__ __forceinline__ SoftmaxTile take_tile_of_queries(const SoftmaxProblem& p,
                                                            const TileQueue& queue, bool again) {
  const auto [tile, head] = take_tile_by_warp(queue, again);
  if (tile < 0) return {-1, 0, 0, 0};
  return tile_of_queries<kQueries, kKeys>(p, tile * kQueries, head);
}

// The number of blocks of keys that a tile of queries walks over.
template <int kQueries, int kKeys>
struct SoftmaxQuerySteps {
  SoftmaxProblem p;
  __device__ int operator()(int tile) const {
    const SoftmaxTile t = tile_of_queries<kQueries, kKeys>(p, tile * kQueries, 0);
    return (t.last - t.begin) / kKeys + 1;
  }
};

// All queries that see a key of the tile of kKeys keys come before this one.
template <int kKeys>
__device__ __forceinline__ int end_query_of_keys(const SoftmaxProblem& p, int first) {
  return visibility_of(p).end_query(min(first + kKeys, p.tokens) - 1);
}

// The number of tiles of queries that a tile of keys walks over.
template <int kKeys, int kQueries>
struct SoftmaxKeySteps {
  SoftmaxProblem p;
  __device__ int operator()(int tile) const {
    const int first = tile * kKeys;
    return (end_query_of_keys<kKeys>(p, first) - first + kQueries - 1) / kQueries;
  }
};

// Scores of the block of keys that the lane's rows do not see become `hidden`.
template <int kKeys>
__device__ __forceinline__ void mask(WarpgroupAccumulator<kKeys>& s, const TileRowKeys& seen,
                                     int block, float hidden) {
  const bool all = block >= seen.last_begin && block + kKeys <= seen.first_end;
  if (__all_sync(~0u, all)) return;      // a vote tells the compiler that the lanes stay together
  const int first = block + lane_col();  // the keys are counted from the lane's first one
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int begin = seen.begin[i] - first, end = seen.end + 8 * i - first;
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

// One lane of each warp arrives, after all of its lanes.
__device__ __forceinline__ void release(Mbarrier& empty) {
  __syncwarp();
  if (lane() == 0) empty.arrive();
}

}  // namespace sbtrain::kernels
