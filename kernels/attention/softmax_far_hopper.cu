#include "kernels/attention/launch_alibi.cuh"
#include "kernels/attention/launch_softmax_hopper.cuh"
#include "kernels/attention/score_scaled.cuh"
#include "kernels/attention/softmax_far.h"

namespace sbtrain::kernels {
namespace {

constexpr const char* kForward = "softmax_far_forward";
constexpr const char* kBackward = "softmax_far_backward";

template <typename Score>
void forward(cudaStream_t stream, const SoftmaxFarProblem& p, void* scheduler, const Score& score) {
  using Policy = FarScore<Score>;
  with_hopper_head_dim(kForward, p.head_dim, [&](auto d) {
    using Shape = HopperSoftmaxForwardShape<d(), Policy>;
    if (p.queries == 0 || p.first_key == p.tokens) return;
    const HopperSoftmaxArguments<Policy> x{.p = p,
                                           .policy = {score},
                                           .q = token_tiles(p, p.q, Shape::kQueries),
                                           .k = token_tiles(p, p.k, Shape::kKeys, p.group),
                                           .v = token_tiles(p, p.v, Shape::kKeys, p.group)};
    launch_persistent<SoftmaxForwardMainloop<Shape, Policy>>(kForward, stream, x, p.queries,
                                                             p.heads, scheduler);
  });
}

template <typename Score>
void backward(cudaStream_t stream, const SoftmaxFarProblem& p, float* delta, void* scheduler,
              const Score& score) {
  using Policy = FarScore<Score>;
  with_hopper_head_dim(kBackward, p.head_dim, [&](auto d) {
    using Query = HopperSoftmaxQueryShape<d(), Policy>;
    using Key = HopperSoftmaxKeyShape<d(), Policy>;
    if (p.queries == 0 || p.first_key == p.tokens) return;
    const dim3 rows = attention_grid(p.tokens, kDeltaThreads * 8 / d(), p.heads);
    softmax_delta_kernel<d()><<<rows, kDeltaThreads, 0, stream>>>(p, delta);
    check_launch(kBackward);
    HopperSoftmaxArguments<Policy> x{.p = p,
                                     .policy = {score},
                                     .delta_HT = delta,
                                     .q = token_tiles(p, p.q, Query::kQueries),
                                     .k = token_tiles(p, p.k, Query::kKeys, p.group),
                                     .v = token_tiles(p, p.v, Query::kKeys, p.group),
                                     .dout = token_tiles(p, p.dout, Query::kQueries)};
    launch_persistent<SoftmaxQueryGradientMainloop<Query, Policy>>(kBackward, stream, x, p.queries,
                                                                   p.heads, scheduler);
    x.q = token_tiles(p, p.q, Key::kQueries);
    x.dout = token_tiles(p, p.dout, Key::kQueries);
    x.k = token_tiles(p, p.k, Key::kRows, p.group);
    x.v = token_tiles(p, p.v, Key::kRows, p.group);
    launch_persistent<SoftmaxKeyGradientMainloop<Key, Policy>>(
        kBackward, stream, x, p.tokens - p.first_key / Key::kKeys * Key::kKeys, p.heads / p.group,
        scheduler);
  });
}

}  // namespace

void softmax_far_forward_hopper(cudaStream_t stream, const SoftmaxFarProblem& p, void* scheduler) {
  forward(stream, p, scheduler, ScaledScore{p.scale * kLog2e});
}
void softmax_far_forward_hopper(cudaStream_t stream, const SoftmaxFarProblem& p, void* scheduler,
                                const AlibiSlopes& slopes) {
  forward(stream, p, scheduler, alibi_score(kForward, p, slopes));
}

void softmax_far_backward_hopper(cudaStream_t stream, const SoftmaxFarProblem& p, void* scratch,
                                 void* scheduler) {
  backward(stream, p, static_cast<float*>(scratch), scheduler, ScaledScore{p.scale * kLog2e});
}
void softmax_far_backward_hopper(cudaStream_t stream, const SoftmaxFarProblem& p, void* scratch,
                                 void* scheduler, const AlibiSlopes& slopes) {
  backward(stream, p, static_cast<float*>(scratch), scheduler, alibi_score(kBackward, p, slopes));
}

}  // namespace sbtrain::kernels
