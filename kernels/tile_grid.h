// The tiles of a matrix as the blocks of a launch. A grid has at most 65,535 blocks in its second
// and third dimension, fewer than millions of tokens have tiles, so all tiles are counted in the
// first: those of a row of tiles, then the next row.
#pragma once

#include <cstdint>

namespace sbtrain::kernels {

struct TilePlace {
  int64_t down, across;
};

struct TileGrid {
  unsigned across = 1;  // tiles of a row
  unsigned down = 1;    // rows of tiles
  static constexpr TileGrid of(int64_t rows, int64_t cols, int64_t tile) {
    return {.across = static_cast<unsigned>((cols + tile - 1) / tile),
            .down = static_cast<unsigned>((rows + tile - 1) / tile)};
  }
  // 2^31 - 1 at most are launched, so that their number fits.
  constexpr unsigned blocks() const { return across * down; }
  constexpr TilePlace place(unsigned block) const {
    const unsigned row = block / across;
    return {.down = row, .across = block - row * across};
  }
};

}  // namespace sbtrain::kernels
