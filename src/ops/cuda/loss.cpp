#include "ops/loss.h"

#include "kernels/cross_entropy.h"
#include "ops/cuda/context.h"

namespace sbtrain::ops::cuda {

void run(Cuda, Stream& s, const CrossEntropy& op, const CrossEntropy::Scratch& scratch) {
  const int64_t tokens = op.x_TD.rows();
  const int64_t chunk = scratch.logits.tensor().rows();
  for (int64_t begin = 0; begin < tokens; begin += chunk) {
    const int64_t count = std::min(chunk, tokens - begin);
    const Tensor x = op.x_TD.row_range(begin, count);
    const Tensor logits = scratch.logits.tensor().row_range(0, count);
    const float alpha = op.logit_scale;
    gemm(s, {.y = logits, .a = x, .b = op.w_VD, .transpose_b = true, .alpha = alpha},
         scratch.workspace);
    kernels::CrossEntropy p{.loss = op.loss_T.f32() + begin,
                            .dlogits = scratch.dlogits.tensor(),
                            .logits = logits,
                            .targets = op.targets_T.i32() + begin,
                            .rows = count,
                            .vocab = op.w_VD.rows(),
                            .loss_weight = op.loss_weight,
                            .z_loss = op.z_loss};
    if (op.hits_T.defined()) p.hits = op.hits_T.f32() + begin;
    kernels::launch(cuda_stream(s), p);
    if (!op.dx_TD.defined()) continue;
    const Tensor dlogits = scratch.dlogits.tensor().row_range(0, count);
    run_both(
        s, scratch.workspace, scratch.second,
        [&](const Buffer& workspace) {
          gemm(s,
               {.y = op.dx_TD.row_range(begin, count), .a = dlogits, .b = op.w_VD, .alpha = alpha},
               workspace);
        },
        [&](const Buffer& workspace) {
          gemm(s,
               {.y = op.dw_VD,
                .a = dlogits,
                .b = x,
                .transpose_a = true,
                .alpha = alpha,
                .beta = op.accumulate_dw || begin > 0 ? 1.0f : 0.0f},
               workspace);
        });
  }
}

}  // namespace sbtrain::ops::cuda
