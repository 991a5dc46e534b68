// Scratch of the attention kernels in bytes: plain arithmetic, so that memory can be planned on a
// machine without a GPU.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/scratch_sizes.h"

namespace sbtrain::kernels {

constexpr size_t align_scratch(size_t bytes) {
  return (bytes + 255) / 256 * 256;
}

// ---- kernels/attention/softmax.h ----------------------------------------------------------------

// rowsum(do * o) of every query and head, f32 [H, T].
constexpr size_t softmax_backward_scratch_bytes(int64_t tokens, int64_t heads) {
  return align_scratch(static_cast<size_t>(tokens * heads) * sizeof(float));
}

// ---- kernels/attention/stickbreaking.h ----------------------------------------------------------

// Sums over the tokens' parts for the gradient of the remainder's vector, f32 [kTokenParts, H, d].
constexpr size_t stick_remainder_scratch_bytes(int64_t heads, int64_t head_dim) {
  return align_scratch(static_cast<size_t>(kTokenParts * heads * head_dim) * sizeof(float));
}

// ---- Kernels for Hopper (kernels/attention/*_hopper.h) ------------------------------------------

// The order in which tiles of at least 64 tokens are computed.
constexpr size_t tile_scheduler_bytes(int64_t tokens) {
  return align_scratch(static_cast<size_t>(1 + (tokens + 63) / 64) * sizeof(int32_t));
}
constexpr size_t stickbreaking_hopper_forward_scratch_bytes(int64_t tokens) {
  return tile_scheduler_bytes(tokens);
}
// The backward pass keeps four states of 8 bytes of each row and block of 64 keys, and the row's
// first key. Rows come in whole tiles of 64.
inline constexpr int64_t kHopperRowStateBytes = 32;
constexpr int64_t stickbreaking_hopper_rows(int64_t tokens) {
  return (tokens + 63) / 64 * 64;
}
constexpr int64_t stickbreaking_hopper_state_bytes(int64_t tokens, int64_t blocks) {
  return stickbreaking_hopper_rows(tokens) * blocks * kHopperRowStateBytes;
}
constexpr size_t stickbreaking_hopper_backward_scratch_bytes(int64_t tokens, int64_t heads) {
  return align_scratch(static_cast<size_t>(stickbreaking_hopper_rows(tokens) * heads) * 4) +
         tile_scheduler_bytes(tokens);
}

// ---- kernels/attention/softmax_bias.h -----------------------------------------------------------

inline constexpr int kFireUnits = 32;
// Tiles contain masked pairs too, whose distances lie up to this far beyond those of a document.
inline constexpr int64_t kFireMargin = 256;
// The numbers of one block of keys: sums of {dz, dz u} over each of 33 segments and above each of
// 32 breaks, and the gradients of c and m.
inline constexpr int64_t kFireSums = 2 * (kFireUnits + 1 + kFireUnits + 1);
// Keys of a block in the backward pass.
constexpr int64_t fire_block_keys(int64_t head_dim) {
  return head_dim > 128 ? 64 : 128;
}

// The layout of FIRE's scratch, in bytes from its start.
struct FireScratch {
  size_t distances;  // f32 [max_seqlen + 2 * margin, 2]
  size_t r;          // f32 [T + margin]
  size_t breaks;     // f32 [32]
  size_t lines;      // f32 [H, 33, 2]
  size_t bends;      // f32 [H, 32]
  size_t queries;    // f32 [T + margin, 4]; from here on: backward
  size_t delta;      // f32 [H, T]
  size_t partials;   // f32 [H, blocks, kFireSums]
  size_t units;      // f64 [H, 32, 2]
  size_t heads;      // f64 [H, 2]
  size_t bytes;
};
constexpr FireScratch fire_scratch(int64_t tokens, int64_t heads, int64_t head_dim,
                                   int64_t max_seqlen, bool backward) {
  FireScratch s{};
  const auto take = [&](int64_t count, size_t size) {
    const size_t begin = s.bytes;
    s.bytes += align_scratch(static_cast<size_t>(count) * size);
    return begin;
  };
  s.distances = take(2 * (max_seqlen + 2 * kFireMargin), sizeof(float));
  s.r = take(tokens + kFireMargin, sizeof(float));
  s.breaks = take(kFireUnits, sizeof(float));
  s.lines = take(heads * (kFireUnits + 1) * 2, sizeof(float));
  s.bends = take(heads * kFireUnits, sizeof(float));
  if (!backward) return s;
  s.queries = take(4 * (tokens + kFireMargin), sizeof(float));
  s.delta = take(heads * tokens, sizeof(float));
  const int64_t keys = fire_block_keys(head_dim);
  s.partials = take(heads * ((tokens + keys - 1) / keys) * kFireSums, sizeof(float));
  s.units = take(heads * kFireUnits * 2, sizeof(double));
  s.heads = take(heads * 2, sizeof(double));
  return s;
}

}  // namespace sbtrain::kernels
