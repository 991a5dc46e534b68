// Scratch of the attention kernels in bytes: plain arithmetic, so that memory can be planned on a
// machine without a GPU.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/scratch_sizes.h"

namespace sbtrain::kernels {

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
// The backward pass keeps four states of 8 bytes of each row and block of 64 keys, for as many
// heads at a time as fit a budget. Where not even one head fits, it computes segments of queries
// times segments of keys, one after the other. From one to the next it keeps, of one head, the
// states of the rows, and the sums of dq and of a segment's dk and dv.
inline constexpr int64_t kHopperStateBudget = int64_t{1} << 30;  // bytes
inline constexpr int64_t kHopperRowStateBytes = 32;
// A segment is whole tiles of each loop: 64 or 128 queries, 64, 128 or 192 keys.
inline constexpr int64_t kHopperSegmentStep = 384;

struct StickHopperShape {
  int64_t tokens, heads, head_dim;
  int64_t blocks;  // of 64 keys that a row can see
};
// What is computed at a time, and the layout of the scratch in bytes from its start.
struct StickHopperScratch {
  int64_t tokens, heads;
  int64_t segment;  // tokens; those of the pack where there are no segments
  int64_t blocks;   // of keys, whose states are kept
  int64_t rows;     // of a head's first keys
  int64_t state_rows;
  size_t states;      // {T, C} [heads, blocks, state_rows, 4]
  size_t first_keys;  // i32 [heads, rows]
  size_t carries;     // {log2 T, C} [rows]; from here on: with segments
  size_t dq;          // f32 [rows, d]
  size_t dkv;         // f32 [2, segment, d]
  size_t lowest;      // i32 [segments]
  size_t counters;    // i32 [2, segments, segments]: tiles that are taken, in each launch
  size_t orders;      // i32 [2, segment / 64]: of tiles, from the first and from the last one on
  size_t scheduler;   // without segments
  size_t bytes;
  constexpr int64_t segments() const { return (tokens + segment - 1) / segment; }
};
constexpr StickHopperScratch stickbreaking_hopper_layout(const StickHopperShape& x, int64_t heads,
                                                         int64_t segment) {
  const auto round_up = [](int64_t count, int64_t unit) {
    return (count + unit - 1) / unit * unit;
  };
  const bool whole = segment >= x.tokens;
  StickHopperScratch s{};
  s.tokens = x.tokens;
  s.heads = heads;
  s.segment = whole ? x.tokens : segment;
  s.blocks = whole || x.blocks < segment / 64 ? x.blocks : segment / 64;
  s.rows = round_up(x.tokens, 128);
  s.state_rows = round_up(s.segment, 64);
  const auto take = [&](int64_t bytes) {
    const size_t begin = s.bytes;
    s.bytes += align_scratch(static_cast<size_t>(bytes));
    return begin;
  };
  s.states = take(heads * s.blocks * s.state_rows * kHopperRowStateBytes);
  s.first_keys = take(heads * s.rows * 4);
  if (!whole) {
    s.carries = take(s.rows * 8);
    s.dq = take(s.rows * x.head_dim * 4);
    s.dkv = take(segment * x.head_dim * 8);
    s.lowest = take(s.segments() * 4);
    s.counters = take(2 * s.segments() * s.segments() * 4);
    s.orders = take(2 * (segment / 64) * 4);
  } else {
    s.scheduler = take(static_cast<int64_t>(tile_scheduler_bytes(x.tokens)));
  }
  return s;
}
// As many heads as fit, in groups of sizes as equal as possible, or else the longest segments.
// Those are not below 16384 tokens, so that each has work for all multiprocessors: above 2^27
// tokens times channels the sums of dq alone can exceed the budget.
constexpr StickHopperScratch stickbreaking_hopper_backward_scratch(
    const StickHopperShape& x, int64_t budget = kHopperStateBudget, int64_t least_segment = 16512) {
  const auto fits = [&](int64_t heads, int64_t segment) {
    return static_cast<int64_t>(stickbreaking_hopper_layout(x, heads, segment).bytes) <= budget;
  };
  if (fits(1, x.tokens)) {
    int64_t groups = 1;
    while (!fits((x.heads + groups - 1) / groups, x.tokens)) ++groups;
    return stickbreaking_hopper_layout(x, (x.heads + groups - 1) / groups, x.tokens);
  }
  int64_t low = least_segment / kHopperSegmentStep, high = x.tokens / kHopperSegmentStep + 1;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (fits(1, middle * kHopperSegmentStep) ? low : high) = middle;
  }
  const int64_t longest = low * kHopperSegmentStep;
  const int64_t count = (x.tokens + longest - 1) / longest;
  const int64_t equal = (x.tokens + count - 1) / count;
  return stickbreaking_hopper_layout(
      x, 1, (equal + kHopperSegmentStep - 1) / kHopperSegmentStep * kHopperSegmentStep);
}

// The backward pass in a single pass keeps a state of each row, and sums of dq, of as many heads at
// a time as fit the same budget: one head does up to 2^27 tokens times channels, which are sums of
// 512 MiB. All is of whole tiles of 64 queries.
inline constexpr int64_t kSinglePassQueries = 64;
// The layout of the scratch in bytes from its start, and the heads that are computed at a time.
struct StickSinglePassScratch {
  int64_t heads, tiles;
  size_t taken;       // i32
  size_t first_keys;  // i32 [heads, 64 tiles]
  size_t states;      // {log2 T, C} [heads, 64 tiles]
  size_t next;        // i32 [heads, tiles]
  size_t next_dq;     // i32 [heads, tiles]
  size_t dq;          // f32 [heads, tiles, 64 d]
  size_t bytes;
};
constexpr StickSinglePassScratch stickbreaking_single_pass_layout(int64_t tokens, int64_t heads,
                                                                  int64_t head_dim) {
  StickSinglePassScratch s{};
  s.heads = heads;
  s.tiles = (tokens + kSinglePassQueries - 1) / kSinglePassQueries;
  const auto take = [&](int64_t bytes) {
    const size_t begin = s.bytes;
    s.bytes += align_scratch(static_cast<size_t>(bytes));
    return begin;
  };
  const int64_t rows = heads * s.tiles * kSinglePassQueries;
  s.taken = take(4);
  s.first_keys = take(rows * 4);
  s.states = take(rows * 8);
  s.next = take(heads * s.tiles * 4);
  s.next_dq = take(heads * s.tiles * 4);
  s.dq = take(rows * head_dim * 4);
  return s;
}
constexpr StickSinglePassScratch stickbreaking_single_pass_scratch(
    int64_t tokens, int64_t heads, int64_t head_dim, int64_t budget = kHopperStateBudget) {
  int64_t groups = 1, at_a_time = heads;
  while (at_a_time > 1 &&
         static_cast<int64_t>(stickbreaking_single_pass_layout(tokens, at_a_time, head_dim).bytes) >
             budget) {
    ++groups;
    at_a_time = (heads + groups - 1) / groups;
  }
  return stickbreaking_single_pass_layout(tokens, at_a_time, head_dim);
}

// ---- FIRE (kernels/attention/softmax.h) ---------------------------------------------------------

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
