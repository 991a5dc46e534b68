// What the tile scheduler of a persistent kernel (tile_scheduler.cuh) keeps in device memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sbtrain::kernels {

struct TileScheduler {
  int32_t* taken = nullptr;  // how many have been taken
  int32_t* order = nullptr;  // [tiles]; null: there is a block for each tile of each head
  int tiles = 0;             // of one head
  int heads = 0, heads_at_a_time = 0;
};

}  // namespace sbtrain::kernels
