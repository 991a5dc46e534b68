#include "ops/cpu/rotation.h"

namespace sbtrain::ops::cpu {

void run(Cpu, Stream& /*s*/, const Rope& op) {
  const int64_t half = rotated_channels(op.x_THd, op.params) / 2;
  float* x_data = op.x_THd.f32();
  const auto rotate = [&](int64_t t, int64_t column, const float* cosine, const float* sine) {
    float* x1 = x_data + t * op.x_THd.row_stride + column;
    float* x2 = x1 + half;
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
      const float a = x1[i];
      const float b = x2[i];
      x1[i] = a * cosine[i] - b * sine[i];
      x2[i] = b * cosine[i] + a * sine[i];
    }
  };
  for_each_rotated_head(op.x_THd, op.positions_T, op.params, op.lengths_T, rotate);
}

}  // namespace sbtrain::ops::cpu
