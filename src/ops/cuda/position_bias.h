// Position biases as kernels take them.
#pragma once

#include "kernels/attention/position_bias.h"
#include "kernels/attention/scratch_sizes.h"
#include "ops/attention.h"

namespace sbtrain::ops::cuda {

static_assert(kFireHidden == kernels::kFireUnits);

inline kernels::AlibiSlopes alibi_slopes(int heads) {
  kernels::AlibiSlopes slopes{};
  for (int h = 0; h < heads; ++h) slopes.of_head[h] = alibi_slope(heads, h);
  return slopes;
}
inline kernels::FireParameters fire_parameters(const FireTensors& fire) {
  return {fire.c_1, fire.m_1, fire.w1_K, fire.b1_K, fire.w2_HK, fire.b2_H};
}
inline kernels::FireGradients fire_gradients(const FireTensors& dfire) {
  return {dfire.c_1, dfire.m_1, dfire.w1_K, dfire.b1_K, dfire.w2_HK};
}

// Calls call() with what the kernels take of the op's bias: nothing without one, the slopes of
// ALiBi, or the parameters of FIRE and, in the backward pass, their gradients.
template <typename Op, typename Call>
void with_bias(const Op& op, const Call& call) {
  switch (op.bias.kind) {
    case PositionBias::kNone:
      return call();
    case PositionBias::kAlibi:
      return call(alibi_slopes(op.params.heads));
    case PositionBias::kFire:
      if constexpr (requires { op.dfire; }) {
        return call(fire_parameters(op.bias.fire), fire_gradients(op.dfire));
      } else {
        return call(fire_parameters(op.bias.fire));
      }
  }
}

}  // namespace sbtrain::ops::cuda
