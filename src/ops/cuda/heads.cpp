#include "ops/heads.h"

#include "kernels/heads.h"
#include "ops/cuda/arguments.h"
#include "ops/cuda/context.h"

namespace sbtrain::ops::cuda {

void run(Cuda, Stream& s, const RepeatHeads& op) {
  kernels::repeat_heads(cuda_stream(s), {.y = arg(op.y_THd),
                                         .x = arg(op.x_TGd),
                                         .rows = op.y_THd.rows(),
                                         .heads = static_cast<int>(op.y_THd.cols() / op.head_dim),
                                         .groups = static_cast<int>(op.x_TGd.cols() / op.head_dim),
                                         .head_dim = op.head_dim});
}

void run(Cuda, Stream& s, const RepeatHeadsBackward& op) {
  kernels::repeat_heads_backward(cuda_stream(s),
                                 {.dx = arg(op.dx_TGd),
                                  .dy = arg(op.dy_THd),
                                  .rows = op.dy_THd.rows(),
                                  .heads = static_cast<int>(op.dy_THd.cols() / op.head_dim),
                                  .groups = static_cast<int>(op.dx_TGd.cols() / op.head_dim),
                                  .head_dim = op.head_dim});
}

}  // namespace sbtrain::ops::cuda
