// Launches softmax attention with any score function (score_scaled.cuh) on the main loops for
// Hopper.
#pragma once

#include "kernels/attention/launch_persistent.cuh"
#include "kernels/attention/mainloop_softmax_forward_hopper.cuh"
#include "kernels/attention/mainloop_softmax_key_gradient_hopper.cuh"
#include "kernels/attention/mainloop_softmax_query_gradient_hopper.cuh"

namespace sbtrain::kernels {

// Runs a kernel of persistent blocks on tiles of `rows` queries or keys.
template <typename Shape, typename Shared, typename Policy, typename Steps>
void run_persistent(const char* name, cudaStream_t stream,
                    void (*kernel)(HopperSoftmaxArguments<Policy>),
                    HopperSoftmaxArguments<Policy> x, int rows, const Steps& steps, void* queue) {
  const int tiles = static_cast<int>(ceil_div(x.p.tokens, rows));
  x.queue = tile_queue(x.p, x.p.heads, tiles, queue);
  launch_persistent<Shape, Shared>(name, stream, kernel, x, steps);
}

// Writes o and lse. `queue` is scratch of tile_queue_bytes.
template <typename Policy>
void launch_softmax_forward_hopper(const char* name, cudaStream_t stream, const SoftmaxProblem& p,
                                   const Policy& policy, void* queue) {
  with_hopper_head_dim(name, p.head_dim, [&](auto d) {
    using Shape = HopperSoftmaxForwardShape<d(), Policy>;
    if (p.tokens == 0) return;
    const HopperSoftmaxArguments<Policy> x{.p = p,
                                           .policy = policy,
                                           .q = token_tiles(p, p.q, Shape::kQueries),
                                           .k = token_tiles(p, p.k, Shape::kKeys),
                                           .v = token_tiles(p, p.v, Shape::kKeys)};
    run_persistent<Shape, HopperSoftmaxForwardShared<Shape>>(
        name, stream, softmax_forward_hopper_kernel<Shape, Policy>, x, Shape::kQueries,
        SoftmaxQuerySteps<Shape::kQueries, Shape::kKeys>{p}, queue);
  });
}

// Writes dq, dk, dv and the gradients of what the policy learns; `delta` is scratch, f32 [H, T],
// `queue` as above.
template <typename Policy>
void launch_softmax_backward_hopper(const char* name, cudaStream_t stream, const SoftmaxProblem& p,
                                    const Policy& policy, float* delta, void* queue) {
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
                                     .k = token_tiles(p, p.k, Query::kKeys),
                                     .v = token_tiles(p, p.v, Query::kKeys),
                                     .dout = token_tiles(p, p.dout, Query::kQueries)};
    run_persistent<Query, HopperSoftmaxQueryShared<Query>>(
        name, stream, softmax_query_gradient_hopper_kernel<Query, Policy>, x, Query::kQueries,
        SoftmaxQuerySteps<Query::kQueries, Query::kKeys>{p}, queue);
    x.q = token_tiles(p, p.q, Key::kQueries);
    x.dout = token_tiles(p, p.dout, Key::kQueries);
    x.k = token_tiles(p, p.k, Key::kRows);
    x.v = token_tiles(p, p.v, Key::kRows);
    run_persistent<Key, HopperSoftmaxKeyShared<Key>>(
        name, stream, softmax_key_gradient_hopper_kernel<Key, Policy>, x, Key::kKeys,
        SoftmaxKeySteps<Key::kKeys, Key::kQueries>{p}, queue);
  });
}

}  // namespace sbtrain::kernels
