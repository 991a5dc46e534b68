#include "ops/rope.h"

#include "kernels/rope.h"
#include "ops/cuda/arguments.h"
#include "ops/cuda/context.h"
#include "ops/cuda/rope_lengths.h"

namespace sbtrain::ops::cuda {

void run(Cuda, Stream& s, const Rope& op) {
  kernels::Rope p{.x = arg(op.x_THd),
                  .positions = arg(op.positions_T),
                  .rows = op.x_THd.rows(),
                  .heads = op.params.heads,
                  .head_dim = static_cast<int>(op.x_THd.cols() / op.params.heads),
                  .turns = {},
                  .early = begins_early(s)};
  kernels::set_rope_frequencies(p, op.params.frequencies.data(), op.params.inverse);
  set_rope_lengths(p, op.params.dynamic, op.lengths_T);
  kernels::rope(cuda_stream(s), p);
}

}  // namespace sbtrain::ops::cuda
