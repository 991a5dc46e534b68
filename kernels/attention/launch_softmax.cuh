// Launches softmax attention with any score function (score_scaled.cuh).
#pragma once

#include "kernels/attention/launch_attention.h"
#include "kernels/attention/mainloop_softmax_backward.cuh"
#include "kernels/attention/mainloop_softmax_forward.cuh"

namespace sbtrain::kernels {

// Writes o and lse.
template <typename Policy>
void launch_softmax_forward(const char* name, cudaStream_t stream, const SoftmaxProblem& p,
                            const Policy& policy) {
  with_head_dim(name, p.head_dim, [&](auto d) {
    using Shape = SoftmaxForwardShape<d()>;
    if (p.tokens == 0) return;
    constexpr int kPolicyBytes = 2 * Policy::template QueryRows<Shape>::stage_bytes();
    launch_attention(name, stream, softmax_forward_kernel<Shape, Policy>,
                     query_grid(p.tokens, Shape::kQueries, p.heads, p.group), Shape::kThreads,
                     Shape::kSharedBytes + kPolicyBytes, p, policy);
  });
}

// Writes dq, dk, dv and the gradients of what the policy learns; `delta` is scratch, f32 [H, T].
template <typename Policy>
void launch_softmax_backward(const char* name, cudaStream_t stream, const SoftmaxProblem& p,
                             const Policy& policy, float* delta) {
  with_head_dim(name, p.head_dim, [&](auto d) {
    using Queries = SoftmaxQueryShape<d()>;
    using Keys = SoftmaxKeyShape<d()>;
    using KeyScores = typename Policy::template KeyRows<Keys>;
    if (p.tokens == 0) return;
    const dim3 rows = attention_grid(p.tokens, kDeltaThreads * 8 / d(), p.heads);
    softmax_delta_kernel<d()><<<rows, kDeltaThreads, 0, stream>>>(p, delta);
    check_launch(name);
    constexpr int kQueryBytes = 2 * Policy::template QueryRows<Queries>::stage_bytes();
    launch_attention(name, stream, softmax_query_gradient_kernel<Queries, Policy>,
                     query_grid(p.tokens, Queries::kQueries, p.heads, p.group), Queries::kThreads,
                     Queries::kSharedBytes + kQueryBytes, p, policy, delta);
    constexpr int kKeyBytes = 2 * KeyScores::stage_bytes() + KeyScores::shared_bytes();
    const auto launch = [&](auto kernel) {
      launch_attention(name, stream, kernel,
                       attention_grid(p.tokens, Keys::kKeys, p.heads / p.group), Keys::kThreads,
                       Keys::kSharedBytes + kKeyBytes, p, policy, delta);
    };
    p.group > 1 ? launch(softmax_key_gradient_kernel<Keys, Policy, true>)
                : launch(softmax_key_gradient_kernel<Keys, Policy, false>);
  });
}

}  // namespace sbtrain::kernels
