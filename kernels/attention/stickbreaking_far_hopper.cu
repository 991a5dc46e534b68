#include "kernels/attention/far_hopper.cuh"
#include "kernels/attention/launch_stickbreaking_hopper.cuh"
#include "kernels/attention/stickbreaking_hopper.h"

namespace sbtrain::kernels {

void stickbreaking_far_forward_hopper(cudaStream_t stream, const StickBreakingProblem& p,
                                      void* scratch) {
  with_hopper_head_dim("stickbreaking_far_forward", p.head_dim, [&](auto d) {
    if (p.far.queries == 0 || p.far.key == p.tokens) return;
    using Shape = Far<HopperForwardShape<d(), false>>;
    const HopperForwardArguments x{.p = p,
                                   .scheduler = {},
                                   .q = token_tiles(p, p.q, Shape::kQueries),
                                   .k = key_tiles(p, p.k, Shape::kKeys),
                                   .v = key_tiles(p, p.v, Shape::kKeys)};
    launch_persistent<StickForwardMainloop<Shape>>("stickbreaking_far_forward", stream, x,
                                                   p.far.queries, p.heads, scratch);
  });
}

namespace {

// Of the queries p.far.first_query to p.far.queries and `heads` heads from `head` on.
template <typename Query, typename Key>
void launch_far_backward(cudaStream_t stream, const StickBreakingProblem& p, int head, int heads) {
  HopperBackwardArguments x = backward_arguments(p);
  void* const scheduler = place_in_far_scratch(x);
  x.first_head = head;
  x.q = token_tiles(p, p.q, Query::kQueries);
  x.dout = token_tiles(p, p.dout, Query::kQueries);
  launch_persistent<StickQueryGradientMainloop<Query>>(
      "stickbreaking_far_backward", stream, x, p.far.queries - p.far.first_query, heads, scheduler);
  x.q = token_tiles(p, p.q, Key::kQueries);
  x.dout = token_tiles(p, p.dout, Key::kQueries);
  launch_persistent<StickKeyGradientMainloop<Key>>("stickbreaking_far_backward", stream, x,
                                                   keys_of_far_tiles(p, Key::kKeys),
                                                   heads / p.group, scheduler);
}

}  // namespace

void stickbreaking_far_backward_hopper(cudaStream_t stream, const StickBreakingProblem& p) {
  with_hopper_head_dim("stickbreaking_far_backward", p.head_dim, [&](auto d) {
    for_each_part_of_far_queries(p, [&](const StickBreakingProblem& part, int head, int heads) {
      launch_far_backward<Far<QueryGradientShape<d()>>, Far<KeyGradientShape<d()>>>(stream, part,
                                                                                    head, heads);
    });
  });
}

}  // namespace sbtrain::kernels
