#include "ops/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace sbtrain::ops::cpu {

void run(Cpu, Stream& /*s*/, const Argmax& op) {
  for (int64_t b = 0; b < op.x_BV.rows(); ++b) {
    const float* x = op.x_BV.f32() + b * op.x_BV.row_stride;
    const float* end = x + op.vocab;
    float top = -std::numeric_limits<float>::infinity();
    int nan = 0;  // a comparison would pass over NaN
#pragma omp simd reduction(max : top) reduction(| : nan)
    for (int64_t i = 0; i < op.vocab; ++i) {
      top = x[i] > top ? x[i] : top;
      nan |= x[i] != x[i] ? 1 : 0;
    }
    op.y_B.i32()[b] =
        nan == 0 && std::isfinite(top) ? static_cast<int32_t>(std::find(x, end, top) - x) : -1;
  }
}

}  // namespace sbtrain::ops::cpu
