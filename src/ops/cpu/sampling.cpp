#include "ops/sampling.h"

#include <algorithm>
#include <cmath>

namespace sbtrain::ops::cpu {

void run(Cpu, Stream& /*s*/, const Likeliest& op) {
  for (int64_t b = 0; b < op.x_BV.rows(); ++b) {
    const float* x = op.x_BV.f32() + b * op.x_BV.row_stride;
    const float* end = x + op.vocab;
    const float* best = std::max_element(x, end);
    // A NaN is found only where nothing finite hides it, so all are looked at.
    const bool finite =
        std::isfinite(*best) && std::none_of(x, end, [](float value) { return std::isnan(value); });
    op.y_B.i32()[b] = finite ? static_cast<int32_t>(best - x) : -1;
  }
}

}  // namespace sbtrain::ops::cpu
