// Softmax attention with ALiBi or FIRE (ops/softmax_bias.h) on the kernels of softmax.cuh: any
// head dimension up to 128 that is a multiple of 8, any GPU from sm_80 on.
#pragma once

#include "kernels/attention/position_bias.h"
#include "kernels/attention/softmax.h"

namespace sbtrain::kernels {

// As softmax_forward and softmax_backward (softmax.h), at most kMaxAlibiHeads heads.
cudaError_t alibi_forward(cudaStream_t stream, const SoftmaxProblem& problem,
                          const AlibiSlopes& slopes);
cudaError_t alibi_backward(cudaStream_t stream, const SoftmaxProblem& problem,
                           const AlibiSlopes& slopes, void* scratch);

// `scratch` has the bytes of fire_scratch (scratch_sizes.h). The gradients are the same bits on
// every run.
cudaError_t fire_forward(cudaStream_t stream, const SoftmaxProblem& problem,
                         const FireParameters& parameters, void* scratch);
cudaError_t fire_backward(cudaStream_t stream, const SoftmaxProblem& problem,
                          const FireParameters& parameters, const FireGradients& gradients,
                          void* scratch);

}  // namespace sbtrain::kernels
