// The tiles of a matrix as blocks of a grid of one dimension: each tile once, and no number that
// millions of tokens would exceed.
#include "kernels/tile_grid.h"

#include <gtest/gtest.h>

#include <set>
#include <utility>

namespace sbtrain::kernels {
namespace {

TEST(TileGrid, HasEveryTileOnceRowByRow) {
  for (const auto& [rows, cols] :
       {std::pair<int64_t, int64_t>{1, 1}, {64, 64}, {65, 129}, {7, 1000}, {1000, 7}}) {
    const TileGrid grid = TileGrid::of(rows, cols, 64);
    std::set<std::pair<int64_t, int64_t>> seen;
    for (unsigned block = 0; block < grid.blocks(); ++block) {
      const TilePlace place = grid.place(block);
      EXPECT_LT(place.down * 64, rows);
      EXPECT_LT(place.across * 64, cols);
      EXPECT_TRUE(seen.insert({place.down, place.across}).second);
      EXPECT_EQ(block, place.down * grid.across + place.across);
    }
    EXPECT_EQ(static_cast<int64_t>(seen.size()), (rows + 63) / 64 * ((cols + 63) / 64));
  }
}

// 65,535 blocks in a dimension are too few for either of these.
TEST(TileGrid, TakesMillionsOfTokensInEitherDirection) {
  constexpr int64_t kTokens = int64_t{1} << 23;
  for (const bool down : {true, false}) {
    const TileGrid grid = TileGrid::of(down ? kTokens : 2048, down ? 2048 : kTokens, 32);
    EXPECT_EQ(int64_t{grid.blocks()}, kTokens / 32 * 64);
    EXPECT_LT(grid.blocks(), 1U << 31);
    const TilePlace last = grid.place(grid.blocks() - 1);
    EXPECT_EQ((last.down + 1) * 32, down ? kTokens : 2048);
    EXPECT_EQ((last.across + 1) * 32, down ? 2048 : kTokens);
  }
}

}  // namespace
}  // namespace sbtrain::kernels
