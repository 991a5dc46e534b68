// The scratch of the stick-breaking backward pass for sm_90a, and the segments that it computes one
// after the other where the states of a whole head do not fit (scratch_sizes.h).
#pragma once

#include "kernels/attention/stickbreaking_backward_hopper.cuh"

namespace sbtrain::kernels {

inline bool in_segments(const StickBreakingProblem& p) {
  return p.workspace_tokens < p.tokens || p.workspace_heads < p.group;
}

// Whether dk and dv are computed of one head of queries of each group at a time.
inline bool by_member(const StickBreakingProblem& p) {
  return p.gate != nullptr && p.group > 1;
}

// What launches of segments have beside their arguments.
struct SegmentLaunches {
  int* lowest;    // of each segment of queries
  int* counters;  // of tiles that are taken, zero; each launch has the next
  int* orders;
  int segments, tiles;  // tiles: the most of a launch
};

// The layout of the problem's workspace.
inline StickHopperScratch layout_of(const StickBreakingProblem& p) {
  return stickbreaking_hopper_layout({.tokens = p.tokens,
                                      .heads = p.heads,
                                      .head_dim = p.head_dim,
                                      .blocks = p.workspace_blocks,
                                      .group = p.group,
                                      .gated = p.gate != nullptr},
                                     p.workspace_heads, p.workspace_tokens);
}
// Gives the arguments their places in it; returns that of the scheduler.
inline void* place_in_scratch(HopperBackwardArguments& x) {
  const StickHopperScratch s = layout_of(x.p);
  auto* const bytes = reinterpret_cast<unsigned char*>(x.p.workspace);
  x.rows = static_cast<int>(s.rows);
  x.state_rows = static_cast<int>(s.state_rows);
  x.first_keys = reinterpret_cast<int*>(bytes + s.first_keys);
  if (x.p.gate) x.gates = reinterpret_cast<KeyGates*>(bytes + s.gates);
  if (in_segments(x.p) || by_member(x.p)) {
    if (x.p.gate) x.part.dgate = reinterpret_cast<float*>(bytes + s.dgate);
    x.part.dkv = reinterpret_cast<float*>(bytes + s.dkv);
    x.part.dkv_rows = static_cast<int>(s.dkv_rows);
  }
  if (in_segments(x.p)) {
    x.part.carries = reinterpret_cast<float2*>(bytes + s.carries);
    x.part.dq = reinterpret_cast<float*>(bytes + s.dq);
  }
  x.p.workspace_blocks = static_cast<int>(s.blocks);
  return bytes + s.scheduler;
}
inline SegmentLaunches segment_launches(const StickBreakingProblem& p) {
  const StickHopperScratch s = layout_of(p);
  auto* const bytes = reinterpret_cast<unsigned char*>(p.workspace);
  return {.lowest = reinterpret_cast<int*>(bytes + s.lowest),
          .counters = reinterpret_cast<int*>(bytes + s.counters),
          .orders = reinterpret_cast<int*>(bytes + s.orders),
          .segments = static_cast<int>(s.segments()),
          .tiles = static_cast<int>(s.segment / 64)};
}

// Of a head: the first key that any query of each segment sees, a block for each, and both orders.
inline constexpr int kSegmentThreads = 256;
static __global__ void __launch_bounds__(kSegmentThreads)
    prepare_segments_kernel(const StickBreakingProblem p, int head,
                            const SegmentLaunches launches) {
  __shared__ int lowest[kSegmentThreads];
  const int thread = static_cast<int>(threadIdx.x), segment = static_cast<int>(blockIdx.x);
  const Visibility seen = visibility_of<true>(p, StickHead(p, head));
  const int first = segment * p.workspace_tokens;
  const int end = min(first + p.workspace_tokens, p.tokens);
  int mine = INT_MAX;  // the first of 64 rows sees furthest to the left
  for (int row = first + 64 * thread; row < end; row += 64 * kSegmentThreads) {
    mine = min(mine, seen.first_key(row));
  }
  lowest[thread] = mine;
  __syncthreads();
  if (thread == 0) {
    for (int i = 1; i < kSegmentThreads; ++i) mine = min(mine, lowest[i]);
    launches.lowest[segment] = mine;
  }
  if (segment > 0) return;
  for (int i = thread; i < launches.tiles; i += kSegmentThreads) {
    launches.orders[i] = i;
    launches.orders[launches.tiles + i] = launches.tiles - 1 - i;
  }
}

// Calls run(queries, keys), how many there are of each, with each segment of queries that follows a
// segment of keys, for one segment of keys after the other. So rows meet their keys from left to
// right, and of dk and dv one segment's sums are kept at a time, or those of all segments until the
// last head of a group. clear(sums, count) sets sums to zero; end(keys) comes after the last
// segment of queries of a segment of keys.
template <typename Run, typename Clear, typename End>
void for_each_segment(HopperBackwardArguments& x, const Run& run, const Clear& clear,
                      const End& end) {
  const int tokens = x.p.tokens, segment = x.p.workspace_tokens;
  const int* const lowest = segment_launches(x.p).lowest;
  HopperSegments& part = x.part;
  part.member = x.first_head % x.p.group;
  float* const dkv = part.dkv;
  clear(part.dq, int64_t{x.rows} * x.p.head_dim);
  for (part.first_key = 0; part.first_key < tokens; part.first_key = part.end_key) {
    part.end_key = part.first_key + segment;
    part.dkv = x.p.group > 1 ? dkv + int64_t{part.first_key} * x.p.head_dim : dkv;
    for (int which = 0; part.member == 0 && which < 2; ++which) {
      clear(part.dkv + int64_t{which} * part.dkv_rows * x.p.head_dim,
            int64_t{segment} * x.p.head_dim);
    }
    if (x.p.gate) clear(part.dgate, int64_t{8} * segment);
    const int keys = std::min(segment, tokens - part.first_key);
    for (part.first_query = part.first_key; part.first_query < tokens;
         part.first_query = part.end_query) {
      part.end_query = part.first_query + segment;
      part.lowest = lowest + part.first_query / segment;
      run(std::min(segment, tokens - part.first_query), keys);
    }
    end(keys);
  }
  part.dkv = dkv;
}

// Calls run() for each head of queries of a group, with gates and without segments, and end() after
// it; x.first_head is the first head of the first one of `heads` / group groups. clear() as above.
template <typename Run, typename Clear, typename End>
void for_each_member(HopperBackwardArguments& x, int heads, const Run& run, const Clear& clear,
                     const End& end) {
  HopperSegments& part = x.part;
  const int64_t rows = int64_t{heads / x.p.group} * part.dkv_rows;
  clear(part.dkv, 2 * rows * x.p.head_dim);
  for (part.member = 0; part.member < x.p.group; ++part.member) {
    clear(part.dgate, 8 * rows);
    run();
    end();
  }
}

}  // namespace sbtrain::kernels
