#include "kernels/coca.h"

#include "ops/cuda/arguments.h"
#include "ops/cuda/context.h"
#include "ops/cuda/cuda.h"

namespace sbtrain::ops::cuda {
namespace {

using kernels::CocaTransform;

void run(Stream& s, CocaTransform transform, const Tensor& y_THd, const Tensor& x_THd,
         const Tensor& dy_THd, const Tensor& positions_T, const CocaParams& params) {
  kernels::Coca p{.y = {.x = bf16(y_THd),
                        .x_stride = y_THd.row_stride,
                        .positions = positions_T.i32(),
                        .rows = y_THd.rows(),
                        .heads = params.rope.heads,
                        .head_dim = static_cast<int>(y_THd.cols() / params.rope.heads),
                        .turns = {}},
                  .x = bf16(x_THd),
                  .x_stride = x_THd.row_stride,
                  .dy = bf16_or_null(dy_THd),
                  .dy_stride = dy_THd.row_stride};
  kernels::set_rope_frequencies(p.y, static_cast<double>(params.rope.base), false);
  for (double& turn : p.y.turns) turn *= static_cast<double>(params.rope.position_scale);
  kernels::coca(cuda_stream(s), transform, params.variant == CocaVariant::kStrict, p);
}

}  // namespace

void coca_query(Stream& s, Tensor y_THd, Tensor q_THd, Tensor positions_T,
                const CocaParams& params) {
  run(s, CocaTransform::kQuery, y_THd, q_THd, {}, positions_T, params);
}

void coca_query_backward(Stream& s, Tensor dq_THd, Tensor dy_THd, Tensor q_THd, Tensor positions_T,
                         const CocaParams& params) {
  run(s, CocaTransform::kQueryBackward, dq_THd, q_THd, dy_THd, positions_T, params);
}

void coca_key(Stream& s, Tensor y_THd, Tensor t_THd, Tensor positions_T, const CocaParams& params) {
  run(s, CocaTransform::kKey, y_THd, t_THd, {}, positions_T, params);
}

void coca_key_backward(Stream& s, Tensor dt_THd, Tensor dy_THd, Tensor y_THd, Tensor positions_T,
                       const CocaParams& params) {
  run(s, CocaTransform::kKeyBackward, dt_THd, y_THd, dy_THd, positions_T, params);
}

}  // namespace sbtrain::ops::cuda
