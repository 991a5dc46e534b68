#include "kernels/rope.h"

#include "ops/cuda/arguments.h"
#include "ops/cuda/context.h"
#include "ops/cuda/cuda.h"

namespace sbtrain::ops::cuda {

void rope(Stream& s, Tensor x_THd, Tensor positions_T, const RopeParams& params) {
  kernels::Rope p{.x = bf16(x_THd),
                  .x_stride = x_THd.row_stride,
                  .positions = positions_T.i32(),
                  .rows = x_THd.rows(),
                  .heads = params.heads,
                  .head_dim = static_cast<int>(x_THd.cols() / params.heads),
                  .turns = {}};
  kernels::set_rope_frequencies(p, static_cast<double>(params.base), params.inverse);
  for (double& turn : p.turns) turn *= static_cast<double>(params.position_scale);
  kernels::rope(cuda_stream(s), p);
}

}  // namespace sbtrain::ops::cuda
