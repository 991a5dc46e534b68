// Launches of the stick-breaking backward pass for sm_90a, of whole heads (stickbreaking_hopper.cu)
// and of segments (stickbreaking_segments_hopper.cu).
#pragma once

#include "kernels/attention/launch_persistent.cuh"
#include "kernels/attention/mainloop_stickbreaking_key_gradient_hopper.cuh"
#include "kernels/attention/mainloop_stickbreaking_query_gradient_hopper.cuh"
#include "kernels/attention/segments_hopper.cuh"

namespace sbtrain::kernels {

inline HopperBackwardArguments backward_arguments(const StickBreakingProblem& p) {
  return {.p = p,
          .part = {},
          .scheduler = {},
          .q = {},
          .dout = {},
          .k = key_tiles(p, p.k, kStickKeys),
          .v = key_tiles(p, p.v, kStickKeys)};
}

// Both phases of `heads` heads from x.first_head on, for so many queries and keys.
template <typename Query, typename Key>
void launch_backward(cudaStream_t stream, HopperBackwardArguments& x, int queries, int keys,
                     int heads, void* scheduler) {
  const StickBreakingProblem& p = x.p;
  x.q = token_tiles(p, p.q, Query::kQueries);
  x.dout = token_tiles(p, p.dout, Query::kQueries);
  launch_persistent<StickQueryGradientMainloop<Query>>("stickbreaking_backward", stream, x, queries,
                                                       heads, scheduler);
  x.q = token_tiles(p, p.q, Key::kQueries);
  x.dout = token_tiles(p, p.dout, Key::kQueries);
  launch_persistent<StickKeyGradientMainloop<Key>>("stickbreaking_backward", stream, x, keys, heads,
                                                   scheduler);
}

// Where p.workspace_tokens < p.tokens.
void stickbreaking_backward_in_segments(cudaStream_t stream, const StickBreakingProblem& p);

}  // namespace sbtrain::kernels
