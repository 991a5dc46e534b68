// Softmax attention for GPUs of compute capability 9.0, with wgmma and TMA: the problems of
// softmax.h and softmax_bias.h whose heads have 32, 64 or 128 channels and whose packs have at
// least kHopperTokens tokens. It saves what the portable kernels save, so either backward pass may
// follow either forward pass. All results are the same bits on every run.
#pragma once

#include "kernels/attention/softmax_bias.h"

namespace sbtrain::kernels {

// As the functions without _hopper, whose scratch these take too. `scheduler` is scratch of
// tile_scheduler_bytes (scratch_sizes.h).
void softmax_forward_hopper(cudaStream_t stream, const SoftmaxProblem& problem, void* scheduler);
void softmax_backward_hopper(cudaStream_t stream, const SoftmaxProblem& problem, void* scratch,
                             void* scheduler);

void alibi_forward_hopper(cudaStream_t stream, const SoftmaxProblem& problem,
                          const AlibiSlopes& slopes, void* scheduler);
void alibi_backward_hopper(cudaStream_t stream, const SoftmaxProblem& problem,
                           const AlibiSlopes& slopes, void* scratch, void* scheduler);

void fire_forward_hopper(cudaStream_t stream, const SoftmaxProblem& problem,
                         const FireParameters& parameters, void* scratch, void* scheduler);
void fire_backward_hopper(cudaStream_t stream, const SoftmaxProblem& problem,
                          const FireParameters& parameters, const FireGradients& gradients,
                          void* scratch, void* scheduler);

}  // namespace sbtrain::kernels
