// Position biases as kernels take them.
#pragma once

#include "kernels/attention/position_bias.h"
#include "kernels/attention/scratch_sizes.h"
#include "ops/attention.h"
#include "ops/cuda/arguments.h"

namespace sbtrain::ops::cuda {

static_assert(kFireHidden == kernels::kFireUnits);

inline kernels::AlibiSlopes alibi_slopes(int heads) {
  kernels::AlibiSlopes slopes{};
  for (int h = 0; h < heads; ++h) slopes.of_head[h] = alibi_slope(heads, h);
  return slopes;
}

inline kernels::FireParameters fire_parameters(const FireTensors& fire) {
  return {.c = arg(fire.c_1),
          .m = arg(fire.m_1),
          .w1 = arg(fire.w1_K),
          .b1 = arg(fire.b1_K),
          .w2 = arg(fire.w2_HK),
          .b2 = arg(fire.b2_H)};
}

inline kernels::FireGradients fire_gradients(const FireTensors& dfire) {
  return {.c = arg(dfire.c_1),
          .m = arg(dfire.m_1),
          .w1 = arg(dfire.w1_K),
          .b1 = arg(dfire.b1_K),
          .w2 = arg(dfire.w2_HK)};
}

}  // namespace sbtrain::ops::cuda
