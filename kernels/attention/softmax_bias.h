// Softmax attention with ALiBi or FIRE (ops/attention.h), on the main loops of softmax: any
// head dimension up to 256 that is a multiple of 8, any GPU from sm_80 on.
#pragma once

#include "kernels/attention/position_bias.h"
#include "kernels/attention/softmax.h"

namespace sbtrain::kernels {

// As softmax_forward and softmax_backward (softmax.h), at most kMaxAlibiHeads heads.
void alibi_forward(cudaStream_t stream, const SoftmaxProblem& problem, const AlibiSlopes& slopes);
void alibi_backward(cudaStream_t stream, const SoftmaxProblem& problem, const AlibiSlopes& slopes,
                    void* scratch);

// `scratch` has the bytes of fire_scratch (scratch_sizes.h). The gradients are the same bits on
// every run.
void fire_forward(cudaStream_t stream, const SoftmaxProblem& problem,
                  const FireParameters& parameters, void* scratch);
void fire_backward(cudaStream_t stream, const SoftmaxProblem& problem,
                   const FireParameters& parameters, const FireGradients& gradients, void* scratch);

}  // namespace sbtrain::kernels
