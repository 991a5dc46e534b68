// What the kernels of the stick-breaking backward pass in a single pass are given (sm_90a).
#pragma once

#include "kernels/attention/launch_hopper.h"
#include "kernels/attention/single_pass_shared_hopper.cuh"

namespace sbtrain::kernels {

// Of the heads from first_head on; their places in the workspace of the problem.
template <typename Shape>
SinglePassArguments single_pass_arguments(const StickBreakingProblem& p, int first_head) {
  const StickSinglePassScratch s = stickbreaking_single_pass_layout(
      p.tokens, p.workspace_heads, Shape::kD, Shape::kGated, p.group);
  auto* const bytes = reinterpret_cast<unsigned char*>(p.workspace);
  return {.p = p,
          .scale_log2 = p.scale * kLog2e,
          .first_head = first_head,
          .heads = std::min(p.heads - first_head, p.workspace_heads),
          .tiles = static_cast<int>(s.tiles),
          .places = static_cast<int>(ceil_div(p.tokens, Shape::kKeys)),
          .taken = reinterpret_cast<int*>(bytes + s.taken),
          .first_keys = reinterpret_cast<int*>(bytes + s.first_keys),
          .states = reinterpret_cast<float2*>(bytes + s.states),
          .next = reinterpret_cast<int*>(bytes + s.next),
          .next_dq = reinterpret_cast<int*>(bytes + s.next_dq),
          .dq = reinterpret_cast<float*>(bytes + s.dq),
          .gates = Shape::kGated ? reinterpret_cast<KeyGates*>(bytes + s.gates) : nullptr,
          .dkv = p.group > 1 ? reinterpret_cast<float*>(bytes + s.dkv) : nullptr,
          .q = token_tiles(p, p.q, Shape::kQueries),
          .dout = token_tiles(p, p.dout, Shape::kQueries),
          .k = key_tiles(p, p.k, kStickKeys),
          .v = key_tiles(p, p.v, kStickKeys)};
}

}  // namespace sbtrain::kernels
