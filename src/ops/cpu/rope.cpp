#include "ops/cpu/cpu.h"
#include "ops/cpu/rotation.h"

namespace sbtrain::ops::cpu {

void rope(Stream& /*s*/, Tensor x_THd, Tensor positions_T, const RopeParams& params) {
  const int64_t half = x_THd.cols() / params.heads / 2;
  float* x_data = x_THd.f32();
  const auto rotate = [&](int64_t t, int64_t column, const float* cosine, const float* sine) {
    float* x1 = x_data + t * x_THd.row_stride + column;
    float* x2 = x1 + half;
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
      const float a = x1[i];
      const float b = x2[i];
      x1[i] = a * cosine[i] - b * sine[i];
      x2[i] = b * cosine[i] + a * sine[i];
    }
  };
  for_each_rotated_head(x_THd, positions_T, params, rotate);
}

}  // namespace sbtrain::ops::cpu
