#include "ops/fp8.h"

#include "ops/cuda/context.h"
#include "ops/linear.h"

namespace sbtrain::ops::cuda {

void run(Cuda, Stream& s, const Fp8Product& op, const Fp8Product::Scratch& scratch) {
  Context& c = context(s);
  c.tuner.run(c.blas, c.stream,
              {.y = op.y_MN,
               .a = op.a_MK.x,
               .b = op.b_NK.x,
               .transpose_b = true,
               .alpha = op.alpha,
               .beta = op.residual.defined() ? 1.0f : 0.0f,
               .c = op.residual,
               .a_inverse_scale = op.a_MK.inverse_scale_1,
               .b_inverse_scale = op.b_NK.inverse_scale_1,
               .fast_accumulation = op.fast_accumulation},
              scratch.workspace, s.tuning());
}

}  // namespace sbtrain::ops::cuda
