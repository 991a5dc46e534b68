// What the launches of persistent attention kernels share (sm_90a).
#pragma once

#include "kernels/attention/stickbreaking.h"
#include "kernels/attention/tile_scheduler.h"
#include "kernels/device_attribute.h"
#include "kernels/launch.h"
#include "kernels/primitives/tensor_map.h"

namespace sbtrain::kernels {

template <typename Body>
void with_hopper_head_dim(const char* name, int head_dim, Body&& body) {
  if (head_dim == 32) return body(Int<32>{});
  if (head_dim == 64) return body(Int<64>{});
  if (head_dim == 128) return body(Int<128>{});
  throw_invalid_argument("%s: heads of %d channels, not 32, 64 or 128", name, head_dim);
}

// Columns of a head that one copy brings.
template <typename Problem>
int panel_cols(const Problem& p) {
  return std::min(p.head_dim, 64);
}

// Boxes of `rows` tokens of a head; rows beyond the pack become zero. Coordinates: column, token,
// head. Of keys and values, `group` is the problem's.
template <typename Problem>
CUtensorMap token_tiles(const Problem& p, const HeadRows& x, int rows, int group = 1) {
  return tensor_map(TensorBox<3>{.data = x.data,
                                 .shape = {p.head_dim, p.tokens, p.heads / group},
                                 .strides = {x.stride, p.head_dim},
                                 .box = {panel_cols(p), rows, 1}});
}

// Boxes of `keys` tokens of a head from any token on, permuted as key_of_row
// (score_stickbreaking.cuh) says: row 8 c + 2 q + b of the tile holds key q keys / 4 + 2 c + b, so
// the dimensions are column, b, q, c and head, and the first token is the coordinate of b. Only
// that coordinate is compared with the number of tokens: all keys of a box have to lie in the pack.
inline CUtensorMap key_tiles(const StickBreakingProblem& p, const HeadRows& x, int keys) {
  return tensor_map(
      TensorBox<5>{.data = x.data,
                   .shape = {p.head_dim, p.tokens, 4, keys / 8, p.heads / p.group},
                   .strides = {x.stride, keys / 4 * x.stride, 2 * x.stride, p.head_dim},
                   .box = {panel_cols(p), 2, 4, keys / 8, 1}});
}

// The scheduler of `tiles` tiles a head, with int32 [1 + tiles] in `scratch`. What the tiles walk
// over of the heads that are computed at the same time takes at most half of the L2 cache: keys and
// values, which a group of heads shares, or, with `of_keys`, queries and dO of a whole group.
template <typename Problem>
TileScheduler tile_scheduler(const Problem& p, int heads, int tiles, void* scratch,
                             bool of_keys = false) {
  const int64_t head_bytes = int64_t{4} * p.tokens * p.head_dim;
  const int64_t fit = resident_cache_bytes() / head_bytes;
  const int64_t at_a_time = std::clamp<int64_t>(of_keys ? fit / p.group : fit * p.group, 1, heads);
  auto* words = static_cast<int32_t*>(scratch);
  return {.taken = words,
          .order = words + 1,
          .tiles = tiles,
          .heads = heads,
          .heads_at_a_time = static_cast<int>(at_a_time)};
}

}  // namespace sbtrain::kernels
