#include "kernels/activation.h"
#include "kernels/norm.h"
#include "ops/cuda/arguments.h"
#include "ops/cuda/context.h"
#include "ops/cuda/cuda.h"
#include "ops/scratch.h"

namespace sbtrain::ops::cuda {

void layernorm(Stream& s, Tensor y_TD, Tensor x_TD, Tensor w_D, Tensor b_D, float eps) {
  kernels::layernorm(cuda_stream(s), {.y = bf16(y_TD),
                                      .y_stride = y_TD.row_stride,
                                      .x = bf16(x_TD),
                                      .x_stride = x_TD.row_stride,
                                      .w = bf16(w_D),
                                      .b = bf16(b_D),
                                      .rows = x_TD.rows(),
                                      .cols = x_TD.cols(),
                                      .eps = eps});
}

void layernorm_backward(Stream& s, Tensor dx_TD, Tensor dw_D, Tensor db_D, Tensor dy_TD,
                        Tensor x_TD, Tensor w_D, float eps, bool accumulate) {
  const Buffer scratch = token_partials(s, 2 * x_TD.cols());
  kernels::layernorm_backward(cuda_stream(s), {.dx = bf16(dx_TD),
                                               .dx_stride = dx_TD.row_stride,
                                               .dw = dw_D.f32(),
                                               .db = db_D.f32(),
                                               .dy = bf16(dy_TD),
                                               .dy_stride = dy_TD.row_stride,
                                               .x = bf16(x_TD),
                                               .x_stride = x_TD.row_stride,
                                               .w = bf16(w_D),
                                               .rows = x_TD.rows(),
                                               .cols = x_TD.cols(),
                                               .eps = eps,
                                               .accumulate = accumulate,
                                               .scratch = scratch.tensor().f32()});
}

void add_bias(Stream& s, Tensor y_TN, Tensor b_N) {
  kernels::add_bias(cuda_stream(s), {.y = bf16(y_TN),
                                     .y_stride = y_TN.row_stride,
                                     .b = bf16(b_N),
                                     .rows = y_TN.rows(),
                                     .cols = y_TN.cols()});
}

void bias_gelu(Stream& s, Tensor y_TF, Tensor x_TF, Tensor b_F) {
  kernels::bias_gelu(cuda_stream(s), {.y = bf16(y_TF),
                                      .y_stride = y_TF.row_stride,
                                      .x = bf16(x_TF),
                                      .x_stride = x_TF.row_stride,
                                      .b = bf16(b_F),
                                      .rows = x_TF.rows(),
                                      .cols = x_TF.cols()});
}

void bias_gelu_backward(Stream& s, Tensor dx_TF, Tensor dy_TF, Tensor x_TF, Tensor b_F) {
  kernels::bias_gelu_backward(cuda_stream(s), {.dx = bf16(dx_TF),
                                               .dx_stride = dx_TF.row_stride,
                                               .dy = bf16(dy_TF),
                                               .dy_stride = dy_TF.row_stride,
                                               .x = bf16(x_TF),
                                               .x_stride = x_TF.row_stride,
                                               .b = bf16(b_F),
                                               .rows = x_TF.rows(),
                                               .cols = x_TF.cols()});
}

}  // namespace sbtrain::ops::cuda
