// What the warp-specialised main loops of stick-breaking attention share (sm_90a): tiles that the
// copy engine loads, and what the rows of a warp see of a block of keys.
#pragma once

#include "kernels/attention/stickbreaking_tiles.cuh"
#include "kernels/primitives/mbarrier.cuh"
#include "kernels/primitives/tensor_map.h"
#include "kernels/primitives/tma.cuh"
#include "kernels/primitives/warpgroup.cuh"
#include "kernels/primitives/wgmma.cuh"

namespace sbtrain::kernels {

// The columns of a tile's rows that lie side by side in shared memory (wgmma.cuh).
template <int kD>
inline constexpr int kPanelCols = kD < 64 ? kD : 64;

// The layout kernels see of their dynamic shared memory, aligned as wgmma requires. It takes
// kAlignment bytes more than the layout has.
inline constexpr int kSharedAlignment = 1024;
template <typename Layout>
inline constexpr int kSharedBytes = static_cast<int>(sizeof(Layout)) + kSharedAlignment;
template <typename Layout>
__device__ __forceinline__ Layout& aligned_shared(unsigned char* memory) {
  const uint32_t address = shared_address(memory);
  const uint32_t offset = (kSharedAlignment - address % kSharedAlignment) % kSharedAlignment;
  return *reinterpret_cast<Layout*>(memory + offset);
}

// Blocks of keys begin at multiples of kKeys. One that the pack ends within is loaded together with
// keys to its left, so that nothing beyond the pack is read: the copy engine does not check the
// bounds of permuted keys. Packs have at least kKeys tokens.
template <int kKeys>
__device__ __forceinline__ int first_loaded_key(int block, int tokens) {
  return min(block, tokens - kKeys);
}

// What the lane's two rows of a warp see, like RowKeys<1> in fewer registers. What it says of rows
// beyond the pack has no meaning, except that they see no key.
struct TileRowKeys {
  int begin[2];    // of the lane's rows
  int end;         // of the lane's first row
  int last_begin;  // of the warp's last row
  int first_end;   // of its first one
  TileRowKeys() = default;
  __device__ __forceinline__ TileRowKeys(const Visibility& seen, int first_query)
      : begin{seen.first_key(first_query + lane_row()),
              seen.first_key(first_query + lane_row() + 8)},
        end(first_query + lane_row() + (seen.own_key ? 1 : 0)),
        last_begin(seen.first_key(first_query + 15)),
        first_end(seen.end_key(first_query)) {}
};

// The same for the keys of a block; loaded keys to its left are hidden.
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

// The number of blocks of keys that a tile of queries walks over.
struct QuerySteps {
  StickBreakingProblem p;
  int queries, keys;
  __device__ int operator()(int tile) const {
    const int first = tile * queries;
    const int lowest = visibility_of<false>(p, StickHead(p, 0)).first_key(first);
    return (min(first + queries, p.tokens) - 1) / keys - lowest / keys + 1;
  }
};

// Copies tokens [first, first + kRows) of a head. By one thread.
template <int kRows, int kD>
__device__ __forceinline__ void load_token_tile(__nv_bfloat16* tile, const CUtensorMap& map,
                                                Mbarrier& barrier, int first, int head) {
#pragma unroll
  for (int col = 0; col < kD; col += kPanelCols<kD>) {
    tma_load(tile + col * kRows, map, barrier, col, first, head);
  }
}
// Copies keys [first, first + kKeys) of a head, permuted for the scan. By one thread.
template <int kKeys, int kD>
__device__ __forceinline__ void load_key_tile(__nv_bfloat16* tile, const CUtensorMap& map,
                                              Mbarrier& barrier, int first, int head) {
#pragma unroll
  for (int col = 0; col < kD; col += kPanelCols<kD>) {
    tma_load(tile + col * kKeys, map, barrier, col, first, 0, 0, head);
  }
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

// Rounds scores to the left operand of the next product.
template <int kCols>
__device__ __forceinline__ void round_to_operand(WarpgroupOperand<kCols>& a,
                                                 const WarpgroupAccumulator<kCols>& x) {
#pragma unroll
  for (int k = 0; k < kCols / 16; ++k)
    accumulator_as_a(a.at[k], x.at[0][2 * k], x.at[0][2 * k + 1]);
}

}  // namespace sbtrain::kernels
