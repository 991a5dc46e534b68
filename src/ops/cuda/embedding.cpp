#include "kernels/embedding.h"

#include "ops/cuda/arguments.h"
#include "ops/cuda/context.h"
#include "ops/cuda/cuda.h"
#include "ops/scratch.h"

namespace sbtrain::ops::cuda {

void embedding(Stream& s, Tensor y_TD, Tensor tokens_T, Tensor w_VD, float scale) {
  kernels::embedding(cuda_stream(s), {.y = bf16(y_TD),
                                      .y_stride = y_TD.row_stride,
                                      .ids = tokens_T.i32(),
                                      .w = bf16(w_VD),
                                      .w_stride = w_VD.row_stride,
                                      .tokens = y_TD.rows(),
                                      .width = y_TD.cols(),
                                      .vocab = w_VD.rows(),
                                      .scale = scale});
}

void embedding_backward(Stream& s, Tensor dw_VD, Tensor dy_TD, Tensor tokens_T, float scale) {
  const Buffer scratch = embedding_scratch(s, dy_TD.rows(), dy_TD.cols());
  kernels::embedding_backward(cuda_stream(s), {.dw = dw_VD.f32(),
                                               .dw_stride = dw_VD.row_stride,
                                               .dy = bf16(dy_TD),
                                               .dy_stride = dy_TD.row_stride,
                                               .ids = tokens_T.i32(),
                                               .tokens = dy_TD.rows(),
                                               .width = dy_TD.cols(),
                                               .vocab = dw_VD.rows(),
                                               .scale = scale,
                                               .scratch = scratch.tensor().data});
}

}  // namespace sbtrain::ops::cuda
