#include <cmath>
#include <vector>

#include "ops/cpu/cpu.h"
#include "ops/cpu/parallel.h"
#include "ops/cpu/simd.h"

namespace sbtrain::ops::cpu {

void rope(Stream& /*s*/, Tensor x_THd, Tensor positions_T, const RopeParams& params) {
  const int64_t cols = x_THd.cols();
  const int64_t head_dim = cols / params.heads;
  const int64_t half = head_dim / 2;
  std::vector<double> frequencies(static_cast<size_t>(half));
  for (int64_t i = 0; i < half; ++i) {
    const double exponent = static_cast<double>(2 * i) / static_cast<double>(head_dim);
    const double frequency = static_cast<double>(params.position_scale) *
                             std::pow(static_cast<double>(params.base), -exponent);
    frequencies[static_cast<size_t>(i)] = params.inverse ? -frequency : frequency;
  }
  const double* frequency = frequencies.data();
  float* x_data = x_THd.f32();
  const int32_t* positions = positions_T.i32();
  parallel_rows(x_THd.rows(), 2 * cols, [&](int64_t begin, int64_t end) {
    std::vector<float> cosines(static_cast<size_t>(half));
    std::vector<float> sines(static_cast<size_t>(half));
    float* cosine = cosines.data();
    float* sine = sines.data();
    for (int64_t t = begin; t < end; ++t) {
      const auto position = static_cast<double>(positions[t]);
#pragma omp simd
      for (int64_t i = 0; i < half; ++i) {
        simd::sincos(position * frequency[i], sine[i], cosine[i]);
      }
      for (int64_t c = 0; c < cols; c += head_dim) {
        float* x1 = x_data + t * x_THd.row_stride + c;
        float* x2 = x1 + half;
#pragma omp simd
        for (int64_t i = 0; i < half; ++i) {
          const float a = x1[i];
          const float b = x2[i];
          x1[i] = a * cosine[i] - b * sine[i];
          x2[i] = b * cosine[i] + a * sine[i];
        }
      }
    }
  });
}

}  // namespace sbtrain::ops::cpu
