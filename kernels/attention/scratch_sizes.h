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

// The number of heads that are computed at a time if each needs `bytes` of workspace: as many as
// fit a fixed budget, at least one, in parts of sizes as equal as possible.
constexpr int64_t heads_at_a_time(int64_t heads, int64_t bytes) {
  constexpr int64_t kBudget = int64_t{512} << 20;  // bytes
  const int64_t fit = bytes >= kBudget ? 1 : bytes < 1 ? kBudget : kBudget / bytes;
  const int64_t parts = (heads + fit - 1) / fit;
  return (heads + parts - 1) / parts;
}
// The same where heads form groups: whole groups, or if not even one fits, a part of one.
constexpr int64_t heads_at_a_time(int64_t heads, int64_t group, int64_t bytes) {
  const int64_t of_group = heads_at_a_time(group, bytes);
  return of_group < group ? of_group : heads_at_a_time(heads / group, group * bytes) * group;
}

// The same where a layout says what fits: the most of `count`, at least one, in parts of sizes as
// equal as possible.
template <typename Fits>
constexpr int64_t most_that_fit(int64_t count, const Fits& fits) {
  int64_t parts = 1, most = count;
  while (most > 1 && !fits(most)) {
    ++parts;
    most = (count + parts - 1) / parts;
  }
  return most;
}

// Sums of dk and dv that one launch leaves to the next, f32 [2, T, d] in blocks of 64 keys and in
// tiles of heads, for the portable backward pass where the states of a whole group do not fit.
constexpr size_t stick_key_sums_bytes(int64_t tokens, int64_t head_dim) {
  const int64_t width = head_dim <= 32 ? 32 : head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256;
  return align_scratch(static_cast<size_t>(2 * ((tokens + 63) / 64 * 64) * width) * sizeof(float));
}

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
// heads at a time as fit a budget. Where not even one head fits, or not even the heads that share
// keys and values, it computes one head at a time, and of it segments of queries times segments of
// keys, one after the other. From one to the next it keeps, of one head, the states of the rows,
// and the sums of dq and of a segment's dk and dv; from one head of a group to the next, the sums
// of dk and dv of all keys. Groups with gates keep these sums too where all heads of a group fit.
inline constexpr int64_t kHopperStateBudget = int64_t{1} << 30;  // bytes
inline constexpr int64_t kHopperRowStateBytes = 32;
// With gates it has two numbers of each key's.
inline constexpr int64_t kHopperKeyGateBytes = 8;
// A segment is whole tiles of each loop: 64 or 128 queries, 64, 128 or 192 keys.
inline constexpr int64_t kHopperSegmentStep = 384;

struct StickHopperShape {
  int64_t tokens, heads, head_dim;
  int64_t blocks;     // of 64 keys that a row can see
  int64_t group = 1;  // heads of queries that share a head of keys and values
  bool gated = false;
};
// What is computed at a time, and the layout of the scratch in bytes from its start.
struct StickHopperScratch {
  int64_t tokens, heads;
  int64_t segment;  // tokens; those of the pack where there are no segments
  int64_t blocks;   // of keys, whose states are kept
  int64_t rows;     // of a head's first keys
  int64_t dkv_rows;
  int64_t state_rows;
  size_t states;      // {T, C} [heads, blocks, state_rows, 4]
  size_t first_keys;  // i32 [heads, rows]
  size_t gates;       // f32 [heads, tokens / 64, 128], with gates
  // Sums of one head of queries of each group at a time: with segments, or of groups with gates.
  size_t dkv;        // f32 [heads / group or 1, 2, dkv_rows, d]
  size_t dgate;      // f32 [heads / group or 1, dkv_rows, 8], with gates
  size_t carries;    // {log2 T, C} [rows]; from here on: with segments
  size_t dq;         // f32 [rows, d]
  size_t lowest;     // i32 [segments]
  size_t counters;   // i32 [2, segments, segments]: tiles that are taken, in each launch
  size_t orders;     // i32 [2, segment / 64]: of tiles, from the first and from the last one on
  size_t scheduler;  // without segments
  size_t bytes;
  constexpr int64_t segments() const { return (tokens + segment - 1) / segment; }
};
constexpr StickHopperScratch stickbreaking_hopper_layout(const StickHopperShape& x, int64_t heads,
                                                         int64_t segment) {
  const auto round_up = [](int64_t count, int64_t unit) {
    return (count + unit - 1) / unit * unit;
  };
  const bool whole = segment >= x.tokens && heads >= x.group;
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
  if (x.gated) s.gates = take(heads * round_up(x.tokens, 64) * kHopperKeyGateBytes);
  const bool by_member = x.gated && x.group > 1;
  if (!whole || by_member) {
    const int64_t key_heads = whole ? heads / x.group : 1;
    if (whole) {
      s.dkv_rows = round_up(x.tokens, kHopperSegmentStep);
    } else {
      s.dkv_rows = x.group > 1 ? s.segments() * segment : segment;
    }
    s.dkv = take(key_heads * s.dkv_rows * x.head_dim * 8);
    if (x.gated) s.dgate = take(key_heads * s.dkv_rows * 32);
  }
  if (!whole) {
    s.carries = take(s.rows * 8);
    s.dq = take(s.rows * x.head_dim * 4);
    s.lowest = take(s.segments() * 4);
    s.counters = take(2 * s.segments() * s.segments() * 4);
    s.orders = take(2 * (segment / 64) * 4);
  } else {
    s.scheduler = take(static_cast<int64_t>(tile_scheduler_bytes(x.tokens)));
  }
  return s;
}
// As many heads of keys as fit with their queries, in parts of sizes as equal as possible, or else
// the longest segments. Those are not below 16384 tokens, so that each has work for all
// multiprocessors: above 2^27 tokens times channels the sums of dq alone can exceed the budget.
constexpr StickHopperScratch stickbreaking_hopper_backward_scratch(
    const StickHopperShape& x, int64_t budget = kHopperStateBudget, int64_t least_segment = 16512) {
  const auto fits = [&](int64_t heads, int64_t segment) {
    return static_cast<int64_t>(stickbreaking_hopper_layout(x, heads, segment).bytes) <= budget;
  };
  if (fits(x.group, x.tokens)) {
    const int64_t groups = most_that_fit(
        x.heads / x.group, [&](int64_t count) { return fits(count * x.group, x.tokens); });
    return stickbreaking_hopper_layout(x, groups * x.group, x.tokens);
  }
  int64_t low = least_segment / kHopperSegmentStep, high = x.tokens / kHopperSegmentStep + 1;
  if (x.group > 1) ++high;  // all tokens of one head may fit
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

// Whether the backward pass for Hopper is a single pass, which is written for heads of 32 and 64
// channels, with keys of their own or with gates. On an H200, 24 heads of 64 channels and 32768
// tokens without a gate, it takes 3.35 ms instead of 4.24 for documents of 4096 tokens, 11.5
// instead of 15.6 for 16384 and 2.14 instead of 2.89 for many lengths. Where each of the smallest
// tiles, of 64 rows, has a multiprocessor of its own, the two phases have kernels that use all of
// these, while a block of 192 keys would leave most of them idle. Between the two, where each block
// of keys has a multiprocessor of its own, the one with the most queries takes all of the time, and
// that is shorter in a single pass just as where there are many.
constexpr bool takes_single_pass(int64_t tokens, int64_t heads, int64_t head_dim, int64_t group,
                                 bool gated) {
  constexpr int64_t kTile = 64, kMultiprocessors = 132;
  return head_dim <= 64 && (group == 1 || gated) &&
         (tokens + kTile - 1) / kTile * heads > kMultiprocessors;
}

// The backward pass in a single pass keeps a state of each row, and sums of dq, of as many heads at
// a time as fit the same budget: one head does up to 2^27 tokens times channels, which are sums of
// 512 MiB. All is of whole tiles of 64 queries. Of heads that share keys and values it keeps dk and
// dv of each, and adds them at the end: whole groups at a time. Two phases without gates keep none.
inline constexpr int64_t kSinglePassQueries = 64;
inline constexpr int64_t kSinglePassKeys = 192;
// The layout of the scratch in bytes from its start, and the heads that are computed at a time.
struct StickSinglePassScratch {
  int64_t heads, tiles;
  size_t taken;       // i32
  size_t first_keys;  // i32 [heads, 64 tiles]
  size_t states;      // {log2 T, C} [heads, 64 tiles]
  size_t next;        // i32 [heads, tiles]
  size_t next_dq;     // i32 [heads, tiles]
  size_t dq;          // f32 [heads, tiles, 64 d]
  size_t gates;       // f32 [heads, tiles, 128], with gates
  size_t dkv;         // f32 [heads, 2, dkv_rows, d], of groups
  int64_t dkv_rows;   // the keys, in whole blocks
  size_t bytes;
};
constexpr StickSinglePassScratch stickbreaking_single_pass_layout(int64_t tokens, int64_t heads,
                                                                  int64_t head_dim, bool gated,
                                                                  int64_t group = 1) {
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
  if (gated) s.gates = take(rows * kHopperKeyGateBytes);
  if (group > 1) {
    s.dkv_rows = (tokens + kSinglePassKeys - 1) / kSinglePassKeys * kSinglePassKeys;
    s.dkv = take(heads * s.dkv_rows * head_dim * 8);
  }
  return s;
}
constexpr StickSinglePassScratch stickbreaking_single_pass_scratch(
    int64_t tokens, int64_t heads, int64_t head_dim, bool gated, int64_t group = 1,
    int64_t budget = kHopperStateBudget) {
  const auto of_groups = [&](int64_t count) {
    return stickbreaking_single_pass_layout(tokens, count * group, head_dim, gated, group);
  };
  const int64_t groups = most_that_fit(heads / group, [&](int64_t count) {
    return static_cast<int64_t>(of_groups(count).bytes) <= budget;
  });
  return of_groups(groups);
}

// ---- Stick-breaking, backward: how the work is divided, whichever kernels compute it
// -------------

struct StickBackwardShape {
  bool hopper = false;  // else the portable kernels
  int64_t tokens = 0, heads = 0, head_dim = 0;
  int64_t max_seqlen = 0;
  int64_t group = 1;  // heads of queries that share a head of keys and values
  bool gated = false;
  bool learned_remainder = false;
};
// What StickBreakingProblem's workspace is: bytes, and what its workspace_ fields are.
struct StickBackwardPlan {
  bool single_pass = false;  // stickbreaking_backward_single_pass
  int64_t heads = 0, blocks = 0, tokens = 0;
  size_t key_sums = 0;  // where the sums of dk and dv begin; 0: there are none
  size_t bytes = 0;
};
// States for as many heads at a time as fit the budget, and later the sums for the gradient of a
// learned remainder.
constexpr StickBackwardPlan stickbreaking_backward_plan(const StickBackwardShape& x) {
  StickBackwardPlan plan{.blocks = (x.max_seqlen + 126) / 64 + 2, .tokens = x.tokens};
  const StickSinglePassScratch single =
      stickbreaking_single_pass_scratch(x.tokens, x.heads, x.head_dim, x.gated, x.group);
  // Where the sums of a group do not fit, two phases compute one head at a time.
  const bool fits = x.group == 1 || static_cast<int64_t>(single.bytes) <= kHopperStateBudget;
  plan.single_pass =
      x.hopper && fits && takes_single_pass(x.tokens, x.heads, x.head_dim, x.group, x.gated);
  if (plan.single_pass) {
    plan.heads = single.heads;
    plan.bytes = single.bytes;
  } else if (x.hopper) {
    const StickHopperScratch s = stickbreaking_hopper_backward_scratch({.tokens = x.tokens,
                                                                        .heads = x.heads,
                                                                        .head_dim = x.head_dim,
                                                                        .blocks = plan.blocks,
                                                                        .group = x.group,
                                                                        .gated = x.gated});
    plan.heads = s.heads;
    plan.blocks = s.blocks;
    plan.tokens = s.segment;
    plan.bytes = s.bytes;
  } else {
    const int64_t head_bytes = x.tokens * plan.blocks * 8;
    plan.heads = heads_at_a_time(x.heads, x.group, head_bytes);
    plan.bytes = align_scratch(static_cast<size_t>(plan.heads * head_bytes));
    if (plan.heads < x.group) {
      plan.key_sums = plan.bytes;
      plan.bytes += stick_key_sums_bytes(x.tokens, x.head_dim);
    }
  }
  if (!x.learned_remainder) return plan;
  const size_t sums = stick_remainder_scratch_bytes(x.heads, x.head_dim);
  plan.bytes = plan.bytes > sums ? plan.bytes : sums;
  return plan;
}

// ---- Stick-breaking, backward, keys of other ranks (FarSticks), in two phases -------------------

// 16 heads of 16384 queries and as many keys. All tiles are as long as each other, so that of a few
// heads at a time many multiprocessors would wait for the last tiles.
inline constexpr int64_t kFarStateBudget = (int64_t{2} << 30) + (int64_t{128} << 20);  // bytes

// The states of the rows at each block of 64 keys, of as many whole groups of heads as fit a
// budget, or else of one group and as many queries as fit, whole tiles of all loops.
struct StickFarScratch {
  int64_t heads, blocks, tokens;
  size_t first_keys;  // i32 [heads, rows], for Hopper
  size_t scheduler;   // for Hopper
  int64_t rows;       // T, in whole tiles
  size_t bytes;
};
constexpr StickFarScratch stickbreaking_far_layout(bool hopper, int64_t tokens, int64_t heads,
                                                   int64_t at_a_time_tokens) {
  const auto round_up = [](int64_t count, int64_t unit) {
    return (count + unit - 1) / unit * unit;
  };
  StickFarScratch s{};
  s.heads = heads;
  s.blocks = (tokens + 63) / 64;
  s.tokens = at_a_time_tokens;
  s.rows = round_up(tokens, 128);
  const auto take = [&](int64_t bytes) {
    const size_t begin = s.bytes;
    s.bytes += align_scratch(static_cast<size_t>(bytes));
    return begin;
  };
  take(heads * s.blocks * round_up(at_a_time_tokens, 64) * (hopper ? kHopperRowStateBytes : 8));
  if (!hopper) return s;
  s.first_keys = take(heads * s.rows * 4);
  s.scheduler = take(static_cast<int64_t>(tile_scheduler_bytes(tokens)));
  return s;
}
constexpr StickFarScratch stickbreaking_far_scratch(bool hopper, int64_t tokens, int64_t heads,
                                                    int64_t group,
                                                    int64_t budget = kFarStateBudget) {
  const auto fits = [&](int64_t at_a_time, int64_t queries) {
    const StickFarScratch s = stickbreaking_far_layout(hopper, tokens, at_a_time, queries);
    return static_cast<int64_t>(s.bytes) <= budget;
  };
  if (fits(group, tokens)) {
    const int64_t groups =
        most_that_fit(heads / group, [&](int64_t count) { return fits(count * group, tokens); });
    return stickbreaking_far_layout(hopper, tokens, groups * group, tokens);
  }
  int64_t parts = 2;
  const auto part = [&] {
    return ((tokens + parts - 1) / parts + kHopperSegmentStep - 1) / kHopperSegmentStep *
           kHopperSegmentStep;
  };
  while (part() > kHopperSegmentStep && !fits(group, part())) ++parts;
  return stickbreaking_far_layout(hopper, tokens, group, part());
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
