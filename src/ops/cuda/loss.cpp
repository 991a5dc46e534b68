#include "kernels/cross_entropy.h"
#include "ops/cuda/context.h"
#include "ops/cuda/cuda.h"
#include "ops/cuda/gemm.h"
#include "ops/scratch.h"

namespace sbtrain::ops::cuda {

void linear_cross_entropy(Stream& s, const CrossEntropy& t) {
  const int64_t tokens = t.x_TD.rows();
  const int64_t vocab = t.w_VD.rows();
  const bool backward = t.dx_TD.defined();
  const LogitsChunk chunk = logits_chunk(s, tokens, vocab, backward);
  const Buffer workspace = linear_workspace(s);
  const int64_t rows = logits_chunk_tokens(s, tokens, vocab);
  for (int64_t begin = 0; begin < tokens; begin += rows) {
    const int64_t count = std::min(rows, tokens - begin);
    const Tensor x = t.x_TD.row_range(begin, count);
    const Tensor logits = chunk.logits.tensor().row_range(0, count);
    gemm(s, {.y = logits, .a = x, .b = t.w_VD, .transpose_b = true, .alpha = t.logit_scale},
         workspace);
    kernels::CrossEntropy p{};
    p.loss = t.loss_T.f32() + begin;
    if (t.hits_T.defined()) p.hits = t.hits_T.f32() + begin;
    p.logits = logits.f32();
    p.logits_stride = logits.row_stride;
    p.targets = t.targets_T.i32() + begin;
    p.rows = count;
    p.vocab = vocab;
    p.loss_weight = t.loss_weight;
    p.z_loss = t.z_loss;
    if (backward) {
      p.dlogits = reinterpret_cast<__nv_bfloat16*>(chunk.dlogits.tensor().bf16());
      p.dlogits_stride = vocab;
    }
    kernels::cross_entropy(cuda_stream(s), p);
    if (!backward) continue;
    const Tensor dlogits = chunk.dlogits.tensor().row_range(0, count);
    gemm(s,
         {.y = t.dx_TD.row_range(begin, count), .a = dlogits, .b = t.w_VD, .alpha = t.logit_scale},
         workspace);
    gemm(s,
         {.y = t.dw_VD,
          .a = dlogits,
          .b = x,
          .transpose_a = true,
          .alpha = t.logit_scale,
          .beta = 1.0f},
         workspace);
  }
}

}  // namespace sbtrain::ops::cuda
