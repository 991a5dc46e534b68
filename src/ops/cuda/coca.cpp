#include "ops/coca.h"

#include "kernels/coca.h"
#include "ops/cuda/arguments.h"
#include "ops/cuda/context.h"
#include "ops/cuda/rope_lengths.h"

namespace sbtrain::ops::cuda {
namespace {

using kernels::CocaTransform;

void transform(Stream& s, CocaTransform which, const Tensor& y_THd, const Tensor& x_THd,
               const Tensor& dy_THd, const Tensor& positions_T, const CocaParams& params,
               const Tensor& lengths_T = {}) {
  kernels::Coca p{.y = {.x = arg(y_THd),
                        .positions = arg(positions_T),
                        .rows = y_THd.rows(),
                        .heads = params.rope.heads,
                        .head_dim = static_cast<int>(y_THd.cols() / params.rope.heads),
                        .turns = {}},
                  .x = arg(x_THd),
                  .dy = arg(dy_THd)};
  kernels::set_rope_frequencies(p.y, params.rope.frequencies.data(), false);
  set_rope_lengths(p.y, params.rope.dynamic, lengths_T);
  kernels::coca(cuda_stream(s), which, params.variant == CocaVariant::kStrict, p);
}

}  // namespace

void run(Cuda, Stream& s, const CocaQuery& op) {
  transform(s, CocaTransform::kQuery, op.y_THd, op.q_THd, {}, op.positions_T, op.params,
            op.lengths_T);
}

void run(Cuda, Stream& s, const CocaQueryBackward& op) {
  transform(s, CocaTransform::kQueryBackward, op.dq_THd, op.q_THd, op.dy_THd, op.positions_T,
            op.params);
}

void run(Cuda, Stream& s, const CocaKey& op) {
  transform(s, CocaTransform::kKey, op.y_THd, op.t_THd, {}, op.positions_T, op.params,
            op.lengths_T);
}

void run(Cuda, Stream& s, const CocaKeyBackward& op) {
  transform(s, CocaTransform::kKeyBackward, op.dt_THd, op.y_THd, op.dy_THd, op.positions_T,
            op.params);
}

}  // namespace sbtrain::ops::cuda
