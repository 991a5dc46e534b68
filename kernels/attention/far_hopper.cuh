// The arguments of the loops over the keys of another rank (sm_90a).
#pragma once

#include "kernels/attention/far_queries.h"
#include "kernels/attention/stickbreaking_backward_hopper.cuh"

namespace sbtrain::kernels {

// Gives the arguments their places in the workspace, which is that of stickbreaking_far_scratch();
// returns the scheduler's.
inline void* place_in_far_scratch(HopperBackwardArguments& x) {
  const StickBreakingProblem& p = x.p;
  const StickFarScratch s =
      stickbreaking_far_layout(/*hopper=*/true, p.tokens, p.workspace_heads, p.workspace_tokens);
  auto* const bytes = reinterpret_cast<unsigned char*>(p.workspace);
  x.rows = static_cast<int>(s.rows);
  x.state_rows = (p.workspace_tokens + 63) / 64 * 64;
  x.first_keys = reinterpret_cast<int*>(bytes + s.first_keys);
  x.part.first_query = p.far.first_query;
  return bytes + s.scheduler;
}

// The keys of the tiles of `keys` of them that hold far keys.
inline int keys_of_far_tiles(const StickBreakingProblem& p, int keys) {
  return p.tokens - p.far.key / keys * keys;
}

}  // namespace sbtrain::kernels
