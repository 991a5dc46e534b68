// The place of the tile of scores that a score function (score_*.cuh) computes. Main loops pass it,
// so that score functions know nothing of the grid: in a persistent kernel a block computes many
// tiles.
#pragma once

namespace sbtrain::kernels {

struct TileCoordinates {
  int head;
  int first;     // row of the block, a query or a key
  int warp_row;  // where the warp's rows begin in the block
};

}  // namespace sbtrain::kernels
