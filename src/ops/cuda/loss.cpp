#include "kernels/cross_entropy.h"
#include "ops/cuda/arguments.h"
#include "ops/cuda/cuda.h"
#include "ops/cuda/gemm.h"
#include "ops/scratch.h"

namespace sbtrain::ops::cuda {

void linear_cross_entropy(Stream& s, const CrossEntropy& t) {
  const int64_t tokens = t.x_TD.rows();
  const int64_t vocab = t.w_VD.rows();
  const bool backward = t.dx_TD.defined();
  const LogitsChunk buffers = logits_chunk(s, tokens, vocab, backward);
  const Buffer workspace = linear_workspace(s);
  const int64_t chunk = logits_chunk_tokens(s, tokens, vocab);
  for (int64_t begin = 0; begin < tokens; begin += chunk) {
    const int64_t count = std::min(chunk, tokens - begin);
    const Tensor logits = buffers.logits.tensor().row_range(0, count);
    const Tensor dlogits = backward ? buffers.dlogits.tensor().row_range(0, count) : Tensor{};
    const Tensor x = t.x_TD.row_range(begin, count);
    gemm(s, {.y = logits, .a = x, .b = t.w_VD, .transpose_b = true, .alpha = t.logit_scale},
         workspace);
    kernels::cross_entropy(cuda_stream(s), {.loss = t.loss_T.f32() + begin,
                                            .dlogits = bf16_or_null(dlogits),
                                            .dlogits_stride = dlogits.row_stride,
                                            .logits = logits.f32(),
                                            .logits_stride = logits.row_stride,
                                            .targets = t.targets_T.i32() + begin,
                                            .rows = count,
                                            .vocab = vocab,
                                            .loss_weight = t.loss_weight,
                                            .z_loss = t.z_loss});
    if (!backward) continue;
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
