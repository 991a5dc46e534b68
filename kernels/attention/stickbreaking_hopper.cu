#include "kernels/attention/launch_stickbreaking_hopper.cuh"
#include "kernels/attention/mainloop_stickbreaking_forward_hopper.cuh"
#include "kernels/attention/stickbreaking_hopper.h"

namespace sbtrain::kernels {
namespace {

template <typename Shape>
void forward(cudaStream_t stream, const StickBreakingProblem& p, void* scratch) {
  constexpr int kKeys = Shape::kKeys;
  const HopperForwardArguments x{.p = p,
                                 .q = token_tiles(p, p.q, Shape::kQueries),
                                 .k = key_tiles(p, p.k, kKeys),
                                 .v = key_tiles(p, p.v, kKeys)};
  launch_persistent<StickForwardMainloop<Shape>>("stickbreaking_forward", stream, x, p.heads,
                                                 scratch);
}

template <typename Query, typename Key>
void backward(cudaStream_t stream, const StickBreakingProblem& p) {
  HopperBackwardArguments x = backward_arguments(p);
  void* const scheduler = place_in_scratch(x);
  for (x.first_head = 0; x.first_head < p.heads; x.first_head += p.workspace_heads) {
    const int heads = std::min(p.heads - x.first_head, p.workspace_heads);
    launch_backward<Query, Key>(stream, x, p.tokens, p.tokens, heads, scheduler);
  }
}

// Whether the smallest tiles of `heads` heads are so few that each has a multiprocessor of its own.
bool few_tiles(const StickBreakingProblem& p, int heads) {
  return ceil_div(p.tokens, 64) * heads <= multiprocessors();
}

}  // namespace

void stickbreaking_forward_hopper(cudaStream_t stream, const StickBreakingProblem& p,
                                  void* scratch) {
  with_hopper_head_dim("stickbreaking_forward", p.head_dim, [&](auto d) {
    if (p.tokens == 0) return;
    if (p.gate) return forward<HopperForwardShape<d(), true>>(stream, p, scratch);
    if constexpr (d() <= 64) {
      if (few_tiles(p, p.heads)) {
        return forward<HopperForwardShape<d(), false, true>>(stream, p, scratch);
      }
    }
    forward<HopperForwardShape<d(), false>>(stream, p, scratch);
  });
}

void stickbreaking_backward_hopper(cudaStream_t stream, const StickBreakingProblem& p) {
  if (in_segments(p)) return stickbreaking_backward_in_segments(stream, p);
  with_hopper_head_dim("stickbreaking_backward", p.head_dim, [&](auto d) {
    if (p.tokens == 0) return;
    if constexpr (d() <= 64) {
      if (few_tiles(p, p.workspace_heads)) {
        return backward<QueryGradientShape<d(), true>, KeyGradientShape<d(), true>>(stream, p);
      }
    }
    backward<QueryGradientShape<d()>, KeyGradientShape<d()>>(stream, p);
  });
}

}  // namespace sbtrain::kernels
