// Softmax attention over packed documents (FlashAttention-2, arXiv 2307.08691), without a bias or
// with ALiBi or FIRE; ops/attention.h says what it computes. With mma.sync: any GPU from sm_80 on,
// any head dimension up to 256 that is a multiple of 8. With wgmma and TMA (_hopper): compute
// capability 9.0, heads of 32, 64 or 128 channels, packs of at least kHopperTokens tokens. Both
// save the same, so either backward pass may follow either forward pass.
#pragma once

#include "kernels/attention/position_bias.h"

namespace sbtrain::kernels {

// A bf16 matrix [T, H*d], of keys and values [T, H/group*d], whose rows may be strided. `data` is
// aligned to 16 bytes and `stride` is a multiple of 8 elements.
using HeadRows = Matrix<bf16>;

struct SoftmaxProblem {
  int tokens = 0, heads = 0, head_dim = 0;
  float scale = 1.0f;
  int window = 0;  // 0: unbounded
  int group = 1;   // heads of queries, neighbours, that share a head of keys and values
  const int32_t* cu_seqlens = nullptr;  // [sequences + 1]
  const int32_t* positions = nullptr;   // [T]
  int sequences = 0;
  int max_seqlen = 0;  // an upper bound of the documents' lengths
  HeadRows q, k, v, o;
  float* lse = nullptr;               // [H, T], natural logarithm
  HeadRows dout{}, dq{}, dk{}, dv{};  // backward
};

// Writes o and lse. `scratch` has the bytes of fire_scratch with FIRE (scratch_sizes.h), else none.
// `scheduler` is scratch of tile_scheduler_bytes. At most kMaxAlibiHeads heads with ALiBi.
void softmax_forward(cudaStream_t stream, const SoftmaxProblem& p, void* scratch);
void softmax_forward(cudaStream_t stream, const SoftmaxProblem& p, void* scratch,
                     const AlibiSlopes& slopes);
void softmax_forward(cudaStream_t stream, const SoftmaxProblem& p, void* scratch,
                     const FireParameters& fire);
void softmax_forward_hopper(cudaStream_t stream, const SoftmaxProblem& p, void* scratch,
                            void* scheduler);
void softmax_forward_hopper(cudaStream_t stream, const SoftmaxProblem& p, void* scratch,
                            void* scheduler, const AlibiSlopes& slopes);
void softmax_forward_hopper(cudaStream_t stream, const SoftmaxProblem& p, void* scratch,
                            void* scheduler, const FireParameters& fire);

// Writes dq, dk and dv, and adds to FIRE's gradients, the same bits on every run. `scratch` has the
// bytes of fire_scratch with FIRE, else softmax_backward_scratch_bytes.
void softmax_backward(cudaStream_t stream, const SoftmaxProblem& p, void* scratch);
void softmax_backward(cudaStream_t stream, const SoftmaxProblem& p, void* scratch,
                      const AlibiSlopes& slopes);
void softmax_backward(cudaStream_t stream, const SoftmaxProblem& p, void* scratch,
                      const FireParameters& fire, const FireGradients& gradients);
void softmax_backward_hopper(cudaStream_t stream, const SoftmaxProblem& p, void* scratch,
                             void* scheduler);
void softmax_backward_hopper(cudaStream_t stream, const SoftmaxProblem& p, void* scratch,
                             void* scheduler, const AlibiSlopes& slopes);
void softmax_backward_hopper(cudaStream_t stream, const SoftmaxProblem& p, void* scratch,
                             void* scheduler, const FireParameters& fire,
                             const FireGradients& gradients);

}  // namespace sbtrain::kernels
