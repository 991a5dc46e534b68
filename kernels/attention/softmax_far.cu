#include "kernels/attention/launch_alibi.cuh"
#include "kernels/attention/launch_softmax.cuh"
#include "kernels/attention/score_scaled.cuh"
#include "kernels/attention/softmax_far.h"

namespace sbtrain::kernels {
namespace {

constexpr const char* kForward = "softmax_far_forward";
constexpr const char* kBackward = "softmax_far_backward";

template <typename Policy>
void forward(cudaStream_t stream, const SoftmaxFarProblem& p, const Policy& policy) {
  with_head_dim(kForward, p.head_dim, [&](auto d) {
    using Shape = SoftmaxForwardShape<d()>;
    if (p.queries == 0 || p.first_key == p.tokens) return;
    launch_attention(kForward, stream, softmax_forward_kernel<Shape, Policy, SoftmaxFarProblem>,
                     query_grid(p.queries, Shape::kQueries, p.heads, p.group), Shape::kThreads,
                     Shape::kSharedBytes, p, policy);
  });
}

template <typename Policy>
void backward(cudaStream_t stream, const SoftmaxFarProblem& p, float* delta, const Policy& policy) {
  with_head_dim(kBackward, p.head_dim, [&](auto d) {
    using Queries = SoftmaxQueryShape<d()>;
    using Keys = SoftmaxKeyShape<d()>;
    if (p.queries == 0 || p.first_key == p.tokens) return;
    const dim3 rows = attention_grid(p.tokens, kDeltaThreads * 8 / d(), p.heads);
    softmax_delta_kernel<d()><<<rows, kDeltaThreads, 0, stream>>>(p, delta);
    check_launch(kBackward);
    launch_attention(kBackward, stream,
                     softmax_query_gradient_kernel<Queries, Policy, SoftmaxFarProblem>,
                     query_grid(p.queries, Queries::kQueries, p.heads, p.group), Queries::kThreads,
                     Queries::kSharedBytes, p, policy, delta);
    const int keys = p.tokens - p.first_key / Keys::kKeys * Keys::kKeys;
    const auto launch = [&](auto kernel) {
      launch_attention(kBackward, stream, kernel,
                       attention_grid(keys, Keys::kKeys, p.heads / p.group), Keys::kThreads,
                       Keys::kSharedBytes, p, policy, delta);
    };
    p.group > 1 ? launch(softmax_key_gradient_kernel<Keys, Policy, true, SoftmaxFarProblem>)
                : launch(softmax_key_gradient_kernel<Keys, Policy, false, SoftmaxFarProblem>);
  });
}

}  // namespace

void softmax_far_forward(cudaStream_t stream, const SoftmaxFarProblem& p) {
  forward(stream, p, ScaledScore{p.scale * kLog2e});
}
void softmax_far_forward(cudaStream_t stream, const SoftmaxFarProblem& p,
                         const AlibiSlopes& slopes) {
  forward(stream, p, alibi_score(kForward, p, slopes));
}

void softmax_far_backward(cudaStream_t stream, const SoftmaxFarProblem& p, void* scratch) {
  backward(stream, p, static_cast<float*>(scratch), ScaledScore{p.scale * kLog2e});
}
void softmax_far_backward(cudaStream_t stream, const SoftmaxFarProblem& p, void* scratch,
                          const AlibiSlopes& slopes) {
  backward(stream, p, static_cast<float*>(scratch), alibi_score(kBackward, p, slopes));
}

}  // namespace sbtrain::kernels
