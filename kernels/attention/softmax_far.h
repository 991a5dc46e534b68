// Softmax attention to the keys of another rank (ops/far_softmax.h), without a bias or with ALiBi.
// With mma.sync, as softmax.h.
#pragma once

#include "kernels/attention/softmax.h"

namespace sbtrain::kernels {

// The first `queries` rows see the keys from first_key on, within a window if there is one; row 0
// of the keys lies `distance` tokens before that of the queries. Of the problem's matrices the
// passes read q, k, v, lse and, backward, o and dout; documents and positions mean nothing.
struct SoftmaxFarProblem : SoftmaxProblem {
  int queries = 0, first_key = 0, distance = 0;
  Matrix<float> o_sum{};                       // [T, H*d]
  Matrix<float> dq_sum{}, dk_sum{}, dv_sum{};  // backward, +=
};

// o_sum and lse of other keys become those of these keys as well.
void softmax_far_forward(cudaStream_t stream, const SoftmaxFarProblem& p);
void softmax_far_forward(cudaStream_t stream, const SoftmaxFarProblem& p,
                         const AlibiSlopes& slopes);

// Adds to dq_sum, dk_sum and dv_sum, the same bits on every run. `scratch` has the bytes of
// softmax_backward_scratch_bytes.
void softmax_far_backward(cudaStream_t stream, const SoftmaxFarProblem& p, void* scratch);
void softmax_far_backward(cudaStream_t stream, const SoftmaxFarProblem& p, void* scratch,
                          const AlibiSlopes& slopes);

// The same with wgmma and TMA, as softmax.h. `scheduler` is scratch of tile_scheduler_bytes. With
// ALiBi the backward pass takes no heads that share keys.
void softmax_far_forward_hopper(cudaStream_t stream, const SoftmaxFarProblem& p, void* scheduler);
void softmax_far_forward_hopper(cudaStream_t stream, const SoftmaxFarProblem& p, void* scheduler,
                                const AlibiSlopes& slopes);
void softmax_far_backward_hopper(cudaStream_t stream, const SoftmaxFarProblem& p, void* scratch,
                                 void* scheduler);
void softmax_far_backward_hopper(cudaStream_t stream, const SoftmaxFarProblem& p, void* scratch,
                                 void* scheduler, const AlibiSlopes& slopes);

}  // namespace sbtrain::kernels
