// Launches softmax attention with any score function (score_scaled.cuh) on the main loops for
// Hopper.
#pragma once

#include "kernels/attention/launch_persistent.cuh"
#include "kernels/attention/mainloop_softmax_forward_hopper.cuh"
#include "kernels/attention/mainloop_softmax_key_gradient_hopper.cuh"
#include "kernels/attention/mainloop_softmax_query_gradient_hopper.cuh"

namespace sbtrain::kernels {

// Writes o and lse. `scheduler` is scratch of tile_scheduler_bytes.
template <typename Policy>
void launch_softmax_forward_hopper(const char* name, cudaStream_t stream, const SoftmaxProblem& p,
                                   const Policy& policy, void* scheduler) {
  with_hopper_head_dim(name, p.head_dim, [&](auto d) {
    using Shape = HopperSoftmaxForwardShape<d(), Policy>;
    if (p.tokens == 0) return;
    const HopperSoftmaxArguments<Policy> x{.p = p,
                                           .policy = policy,
                                           .q = token_tiles(p, p.q, Shape::kQueries),
                                           .k = token_tiles(p, p.k, Shape::kKeys, p.group),
                                           .v = token_tiles(p, p.v, Shape::kKeys, p.group)};
    launch_persistent<SoftmaxForwardMainloop<Shape, Policy>>(name, stream, x, p.heads, scheduler);
  });
}

// Writes dq, dk, dv and the gradients of what the policy learns; `delta` is scratch, f32 [H, T],
// `scheduler` as above.
template <typename Policy>
void launch_softmax_backward_hopper(const char* name, cudaStream_t stream, const SoftmaxProblem& p,
                                    const Policy& policy, float* delta, void* scheduler) {
  with_hopper_head_dim(name, p.head_dim, [&](auto d) {
    using Query = HopperSoftmaxQueryShape<d(), Policy>;
    using Key = HopperSoftmaxKeyShape<d(), Policy>;
    if (p.tokens == 0) return;
    const dim3 rows = attention_grid(p.tokens, kDeltaThreads * 8 / d(), p.heads);
    softmax_delta_kernel<d()><<<rows, kDeltaThreads, 0, stream>>>(p, delta);
    check_launch(name);
    HopperSoftmaxArguments<Policy> x{.p = p,
                                     .policy = policy,
                                     .delta_HT = delta,
                                     .q = token_tiles(p, p.q, Query::kQueries),
                                     .k = token_tiles(p, p.k, Query::kKeys, p.group),
                                     .v = token_tiles(p, p.v, Query::kKeys, p.group),
                                     .dout = token_tiles(p, p.dout, Query::kQueries)};
    launch_persistent<SoftmaxQueryGradientMainloop<Query, Policy>>(name, stream, x, p.heads,
                                                                   scheduler);
    x.q = token_tiles(p, p.q, Key::kQueries);
    x.dout = token_tiles(p, p.dout, Key::kQueries);
    x.k = token_tiles(p, p.k, Key::kRows, p.group);
    x.v = token_tiles(p, p.v, Key::kRows, p.group);
    launch_persistent<SoftmaxKeyGradientMainloop<Key, Policy>>(name, stream, x, p.heads / p.group,
                                                               scheduler);
  });
}

}  // namespace sbtrain::kernels
