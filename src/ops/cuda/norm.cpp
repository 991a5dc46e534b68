#include "ops/norm.h"

#include "kernels/norm.h"
#include "ops/cuda/arguments.h"
#include "ops/cuda/context.h"

namespace sbtrain::ops::cuda {

void run(Cuda, Stream& s, const RmsNorm& op) {
  kernels::rmsnorm(cuda_stream(s), {.y = arg(op.y_TD),
                                    .x = arg(op.x_TD),
                                    .w = arg(op.w_D),
                                    .rows = op.x_TD.rows(),
                                    .cols = op.x_TD.cols(),
                                    .eps = op.eps,
                                    .early = begins_early(s)});
}

void run(Cuda, Stream& s, const RmsNormBackward& op, const Buffer& scratch) {
  kernels::rmsnorm_backward(cuda_stream(s), {.dx = arg(op.dx_TD),
                                             .dw = arg(op.dw_D),
                                             .dy = arg(op.dy_TD),
                                             .x = arg(op.x_TD),
                                             .w = arg(op.w_D),
                                             .rows = op.x_TD.rows(),
                                             .cols = op.x_TD.cols(),
                                             .eps = op.eps,
                                             .accumulate_dw = op.accumulate_dw,
                                             .scratch = arg(scratch),
                                             .early = begins_early(s)});
}

void run(Cuda, Stream& s, const LayerNorm& op) {
  kernels::layernorm(cuda_stream(s), {.y = arg(op.y_TD),
                                      .x = arg(op.x_TD),
                                      .w = arg(op.w_D),
                                      .b = arg(op.b_D),
                                      .rows = op.x_TD.rows(),
                                      .cols = op.x_TD.cols(),
                                      .eps = op.eps});
}

void run(Cuda, Stream& s, const LayerNormBackward& op, const Buffer& scratch) {
  kernels::layernorm_backward(cuda_stream(s), {.dx = arg(op.dx_TD),
                                               .dw = arg(op.dw_D),
                                               .db = arg(op.db_D),
                                               .dy = arg(op.dy_TD),
                                               .x = arg(op.x_TD),
                                               .w = arg(op.w_D),
                                               .rows = op.x_TD.rows(),
                                               .cols = op.x_TD.cols(),
                                               .eps = op.eps,
                                               .accumulate = op.accumulate,
                                               .scratch = arg(scratch)});
}

void run(Cuda, Stream& s, const HeadNorm& op) {
  kernels::head_norm(cuda_stream(s), {.y = arg(op.y_THd),
                                      .x = arg(op.x_THd),
                                      .w = arg(op.w_Hd),
                                      .b = arg(op.b_Hd),
                                      .rows = op.x_THd.rows(),
                                      .heads = op.heads,
                                      .head_dim = static_cast<int>(op.x_THd.cols() / op.heads),
                                      .eps = op.eps});
}

void run(Cuda, Stream& s, const HeadNormBackward& op, const Buffer& scratch) {
  kernels::head_norm_backward(cuda_stream(s),
                              {.dx = arg(op.dx_THd),
                               .dw = arg(op.dw_Hd),
                               .db = arg(op.db_Hd),
                               .dy = arg(op.dy_THd),
                               .x = arg(op.x_THd),
                               .w = arg(op.w_Hd),
                               .rows = op.x_THd.rows(),
                               .heads = op.heads,
                               .head_dim = static_cast<int>(op.x_THd.cols() / op.heads),
                               .eps = op.eps,
                               .scratch = arg(scratch)});
}

void run(Cuda, Stream& s, const HeadRmsNorm& op) {
  kernels::head_rmsnorm(cuda_stream(s), {.y = arg(op.y_THd),
                                         .x = arg(op.x_THd),
                                         .w = arg(op.w_d),
                                         .rows = op.x_THd.rows(),
                                         .heads = op.heads,
                                         .head_dim = static_cast<int>(op.x_THd.cols() / op.heads),
                                         .eps = op.eps});
}

void run(Cuda, Stream& s, const HeadRmsNormBackward& op, const Buffer& scratch) {
  kernels::head_rmsnorm_backward(cuda_stream(s),
                                 {.dx = arg(op.dx_THd),
                                  .dw = arg(op.dw_d),
                                  .dy = arg(op.dy_THd),
                                  .x = arg(op.x_THd),
                                  .w = arg(op.w_d),
                                  .rows = op.x_THd.rows(),
                                  .heads = op.heads,
                                  .head_dim = static_cast<int>(op.x_THd.cols() / op.heads),
                                  .eps = op.eps,
                                  .scratch = arg(scratch)});
}

}  // namespace sbtrain::ops::cuda
