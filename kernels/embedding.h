// The embedding table: lookup and its gradient.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/types.h"

namespace sbtrain::kernels {

// y [tokens, width] = scale * w[ids[t]]; y and w [vocab, width] bf16, ids i32 in [0, vocab): other
// values stop the kernel. Source: embedding.cu.
struct Embedding {
  Matrix<__nv_bfloat16> y;
  const int32_t* ids;
  Matrix<const __nv_bfloat16> w;
  int64_t tokens, width, vocab;
  float scale;
};
void embedding(cudaStream_t stream, const Embedding& p);

// dw[ids[t]] += scale * dy[t]; dw [vocab, width] f32, dy [tokens, width] bf16. The tokens of one id
// are added in the order of t, in a grouping that depends only on the ids.
struct EmbeddingBackward {
  Matrix<float> dw;
  Matrix<const __nv_bfloat16> dy;
  const int32_t* ids;
  int64_t tokens, width, vocab;
  float scale;
  void* scratch;  // embedding_backward_scratch_bytes(tokens, width), aligned to 256 bytes
};
void embedding_backward(cudaStream_t stream, const EmbeddingBackward& p);

}  // namespace sbtrain::kernels
