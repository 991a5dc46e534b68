#include "kernels/norm.h"

#include "ops/cuda/arguments.h"
#include "ops/cuda/context.h"
#include "ops/cuda/cuda.h"
#include "ops/scratch.h"

namespace sbtrain::ops::cuda {

void rmsnorm(Stream& s, Tensor y_TD, Tensor x_TD, Tensor w_D, float eps) {
  kernels::rmsnorm(cuda_stream(s), {.y = bf16(y_TD),
                                    .y_stride = y_TD.row_stride,
                                    .x = bf16(x_TD),
                                    .x_stride = x_TD.row_stride,
                                    .w = bf16(w_D),
                                    .rows = x_TD.rows(),
                                    .cols = x_TD.cols(),
                                    .eps = eps});
}

void rmsnorm_backward(Stream& s, Tensor dx_TD, Tensor dw_D, Tensor dy_TD, Tensor x_TD, Tensor w_D,
                      float eps) {
  const Buffer scratch = token_partials(s, x_TD.cols());
  kernels::rmsnorm_backward(cuda_stream(s), {.dx = bf16(dx_TD),
                                             .dx_stride = dx_TD.row_stride,
                                             .dw = dw_D.f32(),
                                             .dy = bf16(dy_TD),
                                             .dy_stride = dy_TD.row_stride,
                                             .x = bf16(x_TD),
                                             .x_stride = x_TD.row_stride,
                                             .w = bf16(w_D),
                                             .rows = x_TD.rows(),
                                             .cols = x_TD.cols(),
                                             .eps = eps,
                                             .scratch = scratch.tensor().f32()});
}

void head_norm(Stream& s, Tensor y_THd, Tensor x_THd, Tensor w_Hd, Tensor b_Hd, int heads,
               float eps) {
  kernels::head_norm(cuda_stream(s), {.y = bf16(y_THd),
                                      .y_stride = y_THd.row_stride,
                                      .x = bf16(x_THd),
                                      .x_stride = x_THd.row_stride,
                                      .w = bf16(w_Hd),
                                      .b = bf16(b_Hd),
                                      .rows = x_THd.rows(),
                                      .heads = heads,
                                      .head_dim = static_cast<int>(x_THd.cols() / heads),
                                      .eps = eps});
}

void head_norm_backward(Stream& s, Tensor dx_THd, Tensor dw_Hd, Tensor db_Hd, Tensor dy_THd,
                        Tensor x_THd, Tensor w_Hd, int heads, float eps) {
  const Buffer scratch = token_partials(s, 2 * x_THd.cols());
  kernels::head_norm_backward(cuda_stream(s), {.dx = bf16(dx_THd),
                                               .dx_stride = dx_THd.row_stride,
                                               .dw = dw_Hd.f32(),
                                               .db = db_Hd.f32(),
                                               .dy = bf16(dy_THd),
                                               .dy_stride = dy_THd.row_stride,
                                               .x = bf16(x_THd),
                                               .x_stride = x_THd.row_stride,
                                               .w = bf16(w_Hd),
                                               .rows = x_THd.rows(),
                                               .heads = heads,
                                               .head_dim = static_cast<int>(x_THd.cols() / heads),
                                               .eps = eps,
                                               .scratch = scratch.tensor().f32()});
}

}  // namespace sbtrain::ops::cuda
