// What the warp-specialised main loops of stick-breaking attention share (sm_90a): blocks of
// permuted keys that the copy engine loads, and what the rows of a warp see of them.
#pragma once

#include <limits>

#include "kernels/attention/stickbreaking_tiles.cuh"
#include "kernels/attention/tiles_hopper.cuh"

namespace sbtrain::kernels {

// The shape of a loop whose queries have been multiplied by scale * log2(e): their scores are not.
// Where that has no gain they are multiplied by 1.
template <typename Shape>
struct Folded : Shape {
  static constexpr bool kFolded = true;
};
template <typename Shape>
using Unfolded = Shape;
// The shape of a loop over the keys of another rank (FarSticks).
template <typename Shape>
struct Far : Shape {
  static constexpr bool kFar = true;
};
template <typename Shape, bool kGain = true>
__device__ __forceinline__ auto score_scale(const StickBreakingProblem& p) {
  if constexpr (Shape::kFolded && kGain) {
    return UnitScale{};
  } else {
    return p.scale * kLog2e;
  }
}

// Loops with gates hide keys by infinite scores (hide_keys), which a scale of 0 would make NaN.
// They take the smallest normal number for it: by that, every finite score is 0 beside the
// logarithm of a gate, and what dq and dk are instead of 0 is of its size.
inline StickBreakingProblem with_scale_that_hides(StickBreakingProblem p) {
  if (p.gate != nullptr && p.scale == 0.0f) p.scale = std::numeric_limits<float>::min();
  return p;
}

// Blocks of keys begin at multiples of kKeys. One that the pack ends within is loaded together with
// keys to its left, so that nothing beyond the pack is read: the copy engine does not check the
// bounds of permuted keys. Packs have at least kKeys tokens.
template <int kKeys>
__device__ __forceinline__ int first_loaded_key(int block, int tokens) {
  return min(block, tokens - kKeys);
}

// What the rows see of the keys of a block; loaded keys to its left are hidden.
struct BlockKeys {
  const TileRowKeys& rows;
  int block;
  __device__ __forceinline__ KeyRange range(int i) const {
    return {max(rows.begin[i], block), rows.end + 8 * i};
  }
  __device__ __forceinline__ bool all(int begin, int keys) const {
    return begin >= max(rows.last_begin, block) && begin + keys <= rows.first_end;
  }
};

// The number of blocks of keys that a tile of queries walks over; all tiles see the same keys of
// another rank.
template <bool kFar = false>
struct QuerySteps {
  StickBreakingProblem p;
  int queries, keys;
  __device__ int operator()(int tile) const {
    const int first = tile * queries;
    const int lowest = visibility_of<false, kFar>(p, StickHead(p, 0)).first_key(first);
    return (end_key_of_rows<kFar>(p, first + queries) - 1) / keys - lowest / keys + 1;
  }
};

// Copies keys [first, first + kKeys) of a head, permuted for the scan. By one thread.
template <int kKeys, int kD>
__device__ __forceinline__ void load_key_tile(__nv_bfloat16* tile, const CUtensorMap& map,
                                              Mbarrier& barrier, int first, int head) {
#pragma unroll
  for (int col = 0; col < kD; col += kPanelCols<kD>) {
    tma_load(tile + col * kKeys, map, barrier, col, first, 0, 0, head);
  }
}

// Where store_score_chunks() writes what a thread has, in bytes from the tile. The compiler shall
// not take the sum apart: then it would form it anew for every tile.
__device__ __forceinline__ unsigned score_chunk_offset() {
  const unsigned thread = reread_thread();
  unsigned offset =
      (thread % 128 / 32 * 16 + thread % 8) * 128 + (thread % 32 / 8 ^ thread % 8) * 16;
  asm("" : "+r"(offset));
  return offset;
}
// Rounds rows kRow of the warp's lanes and writes half of their columns, four chunks of eight, to a
// tile [64, 64], swizzled as wgmma.cuh says. The warps of a warpgroup have 16 rows each.
template <int kRow>
__device__ __forceinline__ void store_score_chunks(__nv_bfloat16* tile, unsigned offset, int half,
                                                   const WarpgroupAccumulator<64>& x) {
  uint32_t rounded[4];
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int t = 2 * (4 * half + n);
    rounded[n] = pack_bf16(x.of_row(kRow, t), x.of_row(kRow, t + 1));
  }
  stmatrix_x4(shared_address(tile) + (offset ^ 64u * half) + 1024 * kRow, rounded);
}

// Writes the warp's 16 rows of rounded scores to a tile [.., 64], swizzled as wgmma.cuh says.
__device__ __forceinline__ void store_score_tile(__nv_bfloat16* tile, int warp_row,
                                                 const WarpgroupOperand<64>& x) {
  const int row = warp_row + lane() % 16;
#pragma unroll
  for (int c = 0; c < 8; c += 2) {
    stmatrix_x4(shared_address(tile + tile_offset<64>(row, c + lane() / 16)), x.at[c / 2]);
  }
}

}  // namespace sbtrain::kernels
