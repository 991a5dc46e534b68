// What the warp-specialised main loops of attention share (sm_90a): tiles that the copy engine
// loads, and what the rows of a warp see.
#pragma once

#include "kernels/attention/persistent_hopper.cuh"
#include "kernels/attention/visibility.cuh"
#include "kernels/primitives/fragments.cuh"
#include "kernels/primitives/mma.cuh"
#include "kernels/primitives/pipeline.cuh"
#include "kernels/primitives/tensor_map.h"
#include "kernels/primitives/tma.cuh"
#include "kernels/primitives/wgmma.cuh"

namespace sbtrain::kernels {

// The columns of a tile's rows that lie side by side in shared memory (wgmma.cuh).
template <int kD>
inline constexpr int kPanelCols = kD < 64 ? kD : 64;

// What the lane's two rows of a warp see, like RowKeys<1> in fewer registers. Where the visibility
// ends with the pack, rows beyond it see no key, and nothing else that this says of them has a
// meaning.
struct TileRowKeys {
  int begin[2];    // of the lane's rows
  int end;         // of the lane's first row
  int last_begin;  // of the warp's last row
  int first_end;   // of its first one
  TileRowKeys() = default;
  __device__ __forceinline__ TileRowKeys(const Visibility& seen, int first_query)
      : begin{seen.first_key(first_query + lane_row()),
              seen.first_key(first_query + lane_row() + 8)},
        end(seen.far ? seen.tokens : first_query + lane_row() + (seen.own_key ? 1 : 0)),
        last_begin(seen.first_key(first_query + 15)),
        first_end(seen.end_key(first_query)) {}
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

// Rounds scores to the left operand of the next product.
template <int kCols>
__device__ __forceinline__ void round_to_operand(WarpgroupOperand<kCols>& a,
                                                 const WarpgroupAccumulator<kCols>& x) {
#pragma unroll
  for (int k = 0; k < kCols / 16; ++k)
    accumulator_as_a(a.at[k], x.at[0][2 * k], x.at[0][2 * k + 1]);
}

}  // namespace sbtrain::kernels
