#include "ops/embedding.h"

#include "kernels/embedding.h"
#include "ops/cuda/arguments.h"
#include "ops/cuda/context.h"

namespace sbtrain::ops::cuda {

void run(Cuda, Stream& s, const Embedding& op) {
  kernels::embedding(cuda_stream(s), {.y = arg(op.y_TD),
                                      .ids = arg(op.tokens_T),
                                      .w = arg(op.w_VD),
                                      .tokens = op.y_TD.rows(),
                                      .width = op.y_TD.cols(),
                                      .vocab = op.w_VD.rows(),
                                      .scale = op.scale});
}

void run(Cuda, Stream& s, const EmbeddingBackward& op, const Buffer& scratch) {
  kernels::embedding_backward(cuda_stream(s), {.dw = arg(op.dw_VD),
                                               .dy = arg(op.dy_TD),
                                               .ids = arg(op.tokens_T),
                                               .tokens = op.dy_TD.rows(),
                                               .width = op.dy_TD.cols(),
                                               .vocab = op.dw_VD.rows(),
                                               .scale = op.scale,
                                               .scratch = scratch.tensor().data});
}

}  // namespace sbtrain::ops::cuda
