// Launches of stick-breaking attention for sm_90a, shared by stickbreaking_hopper.cu, what is
// folded into the queries (stickbreaking_folded_hopper.cu) and segments
// (stickbreaking_segments_hopper.cu).
#pragma once

#include "kernels/attention/launch_persistent.cuh"
#include "kernels/attention/mainloop_stickbreaking_forward_hopper.cuh"
#include "kernels/attention/mainloop_stickbreaking_key_gradient_hopper.cuh"
#include "kernels/attention/mainloop_stickbreaking_query_gradient_hopper.cuh"
#include "kernels/attention/segments_hopper.cuh"

namespace sbtrain::kernels {

inline HopperBackwardArguments backward_arguments(const StickBreakingProblem& p) {
  return {.p = p,
          .gates = nullptr,
          .part = {},
          .scheduler = {},
          .q = {},
          .dout = {},
          .k = key_tiles(p, p.k, kStickKeys),
          .v = key_tiles(p, p.v, kStickKeys)};
}

// Before both phases of `heads` heads from x.first_head on, with gates.
inline void prepare_gates(cudaStream_t stream, const HopperBackwardArguments& x, int heads) {
  if (x.p.gate == nullptr) return;
  const dim3 grid(static_cast<unsigned>(ceil_div(x.p.tokens, kStickKeys)),
                  static_cast<unsigned>(heads));
  prepare_gates_kernel<<<grid, kStickKeys, 0, stream>>>(x);
  check_launch("stickbreaking_backward");
}

// The phases of `heads` heads of queries from x.first_head on, which are whole groups.
template <typename Query>
void launch_query_gradient(cudaStream_t stream, HopperBackwardArguments& x, int heads,
                           void* scheduler) {
  x.q = token_tiles(x.p, x.p.q, Query::kQueries);
  x.dout = token_tiles(x.p, x.p.dout, Query::kQueries);
  launch_persistent<StickQueryGradientMainloop<Query>>("stickbreaking_backward", stream, x, heads,
                                                       scheduler);
}
template <typename Key>
void launch_key_gradient(cudaStream_t stream, HopperBackwardArguments& x, int heads,
                         void* scheduler) {
  x.q = token_tiles(x.p, x.p.q, Key::kQueries);
  x.dout = token_tiles(x.p, x.p.dout, Key::kQueries);
  launch_persistent<StickKeyGradientMainloop<Key>>("stickbreaking_backward", stream, x,
                                                   heads / x.p.group, scheduler);
}

template <typename Shape>
void launch_forward(cudaStream_t stream, const StickBreakingProblem& p, void* scratch) {
  constexpr int kKeys = Shape::kKeys;
  const HopperForwardArguments x{.p = p,
                                 .q = token_tiles(p, p.q, Shape::kQueries),
                                 .k = key_tiles(p, p.k, kKeys),
                                 .v = key_tiles(p, p.v, kKeys)};
  launch_persistent<StickForwardMainloop<Shape>>("stickbreaking_forward", stream, x, p.heads,
                                                 scratch);
}

template <typename Query, typename Key>
void launch_heads(cudaStream_t stream, const StickBreakingProblem& p) {
  HopperBackwardArguments x = backward_arguments(p);
  void* const scheduler = place_in_scratch(x);
  for (x.first_head = 0; x.first_head < p.heads; x.first_head += p.workspace_heads) {
    const int heads = std::min(p.heads - x.first_head, p.workspace_heads);
    prepare_gates(stream, x, heads);
    launch_query_gradient<Query>(stream, x, heads, scheduler);
    launch_key_gradient<Key>(stream, x, heads, scheduler);
  }
}

// Whether the smallest tiles of `heads` heads are so few that each has a multiprocessor of its own.
inline bool few_tiles(const StickBreakingProblem& p, int heads) {
  return ceil_div(p.tokens, 64) * heads <= multiprocessors();
}

// Without gates; Kind is Folded or Unfolded.
template <template <typename> class Kind>
void launch_forward_of(cudaStream_t stream, const StickBreakingProblem& p, void* scratch) {
  with_hopper_head_dim("stickbreaking_forward", p.head_dim, [&](auto d) {
    if (p.tokens == 0) return;
    if constexpr (d() <= 64) {
      if (few_tiles(p, p.heads)) {
        return launch_forward<Kind<HopperForwardShape<d(), false, true>>>(stream, p, scratch);
      }
    }
    launch_forward<Kind<HopperForwardShape<d(), false>>>(stream, p, scratch);
  });
}
// Kind may be Gated too.
template <template <typename> class Kind>
void launch_backward_of(cudaStream_t stream, const StickBreakingProblem& p) {
  with_hopper_head_dim("stickbreaking_backward", p.head_dim, [&](auto d) {
    if (p.tokens == 0) return;
    if constexpr (d() <= 64) {
      if (few_tiles(p, p.workspace_heads)) {
        return launch_heads<Kind<QueryGradientShape<d(), true>>, Kind<KeyGradientShape<d(), true>>>(
            stream, p);
      }
    }
    // The folded gradient of the keys of 128 channels would spill registers.
    using Key = KeyGradientShape<d()>;
    using OfKind = Kind<Key>;
    launch_heads<Kind<QueryGradientShape<d()>>,
                 std::conditional_t<OfKind::kFolded && (d() > 64), Key, OfKind>>(stream, p);
  });
}

// Where p.scale is kFoldedScale.
void stickbreaking_forward_folded(cudaStream_t stream, const StickBreakingProblem& p,
                                  void* scratch);
void stickbreaking_backward_folded(cudaStream_t stream, const StickBreakingProblem& p);
// With gates.
void stickbreaking_backward_gated(cudaStream_t stream, const StickBreakingProblem& p);
// Where p.workspace_tokens < p.tokens.
void stickbreaking_backward_in_segments(cudaStream_t stream, const StickBreakingProblem& p);

}  // namespace sbtrain::kernels
