// The scratch of the stick-breaking backward pass for sm_90a, and the segments that it computes one
// after the other where the states of a whole head do not fit (scratch_sizes.h).
#pragma once

#include "kernels/attention/stickbreaking_backward_hopper.cuh"

namespace sbtrain::kernels {

inline bool in_segments(const StickBreakingProblem& p) {
  return p.workspace_tokens < p.tokens;
}

// Gives the arguments their places in the problem's workspace; returns that of the scheduler.
inline void* place_in_scratch(HopperBackwardArguments& x) {
  StickBreakingProblem& p = x.p;
  const StickHopperScratch s = stickbreaking_hopper_layout(
      {.tokens = p.tokens, .heads = p.heads, .head_dim = p.head_dim, .blocks = p.workspace_blocks},
      p.workspace_heads, p.workspace_tokens);
  auto* const bytes = reinterpret_cast<unsigned char*>(p.workspace);
  x.rows = static_cast<int>(s.rows);
  x.state_rows = static_cast<int>(s.state_rows);
  x.first_keys = reinterpret_cast<int*>(bytes + s.first_keys);
  if (in_segments(p)) {
    x.part.carries = reinterpret_cast<float2*>(bytes + s.carries);
    x.part.dq = reinterpret_cast<float*>(bytes + s.dq);
    x.part.dkv = reinterpret_cast<float*>(bytes + s.dkv);
  }
  p.workspace_blocks = static_cast<int>(s.blocks);
  return bytes + s.scheduler;
}

// Calls run(queries, keys), how many there are of each, with each segment of queries that follows a
// segment of keys, for one segment of keys after the other. So rows meet their keys from left to
// right, and of dk and dv one segment's sums are kept at a time. clear(sums, count) sets sums to
// zero.
template <typename Run, typename Clear>
void for_each_segment(HopperBackwardArguments& x, const Run& run, const Clear& clear) {
  const int tokens = x.p.tokens, segment = x.p.workspace_tokens;
  HopperSegments& part = x.part;
  clear(part.dq, int64_t{x.rows} * x.p.head_dim);
  for (part.first_key = 0; part.first_key < tokens; part.first_key = part.end_key) {
    part.end_key = part.first_key + segment;
    clear(part.dkv, int64_t{2} * segment * x.p.head_dim);
    const int keys = std::min(segment, tokens - part.first_key);
    for (part.first_query = part.first_key; part.first_query < tokens;
         part.first_query = part.end_query) {
      part.end_query = part.first_query + segment;
      run(std::min(segment, tokens - part.first_query), keys);
    }
  }
}

}  // namespace sbtrain::kernels
