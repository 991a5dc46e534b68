// Softmax attention over packed documents (FlashAttention-2, arXiv 2307.08691) with mma.sync: any
// GPU from sm_80 on, any head dimension up to 256 that is a multiple of 8. ops/attention.h says
// what it computes.
#pragma once

#include "kernels/types.h"

namespace sbtrain::kernels {

// A bf16 matrix [T, H*d] whose rows may be strided. `data` is aligned to 16 bytes and `stride` is
// a multiple of 8 elements.
using HeadRows = Matrix<bf16>;

struct SoftmaxProblem {
  int tokens = 0, heads = 0, head_dim = 0;
  float scale = 1.0f;
  int window = 0;                       // 0: unbounded
  const int32_t* cu_seqlens = nullptr;  // [sequences + 1]
  const int32_t* positions = nullptr;   // [T]
  int sequences = 0;
  int max_seqlen = 0;  // an upper bound of the documents' lengths
  HeadRows q, k, v, o;
  float* lse = nullptr;               // [H, T], natural logarithm
  HeadRows dout{}, dq{}, dk{}, dv{};  // backward
};

// Writes o and lse.
void softmax_forward(cudaStream_t stream, const SoftmaxProblem& problem);

// Writes dq, dk and dv, the same bits on every run. `scratch` has softmax_backward_scratch_bytes
// (scratch_sizes.h).
void softmax_backward(cudaStream_t stream, const SoftmaxProblem& problem, void* scratch);

}  // namespace sbtrain::kernels
