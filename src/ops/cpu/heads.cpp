#include "ops/heads.h"

#include <algorithm>

#include "ops/cpu/parallel.h"

namespace sbtrain::ops::cpu {

void run(Cpu, Stream& /*s*/, const RepeatHeads& op) {
  const int64_t d = op.head_dim;
  const int64_t cols = op.y_THd.cols();
  const int64_t group = cols / op.x_TGd.cols();
  float* y_data = op.y_THd.f32();
  const float* x_data = op.x_TGd.f32();
  parallel_rows(op.y_THd.rows(), cols, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* x = x_data + t * op.x_TGd.row_stride;
      float* y = y_data + t * op.y_THd.row_stride;
      for (int64_t h = 0; h < cols / d; ++h) std::copy_n(x + h / group * d, d, y + h * d);
    }
  });
}

void run(Cpu, Stream& /*s*/, const RepeatHeadsBackward& op) {
  const int64_t d = op.head_dim;
  const int64_t cols = op.dy_THd.cols();
  const int64_t group = cols / op.dx_TGd.cols();
  float* dx_data = op.dx_TGd.f32();
  const float* dy_data = op.dy_THd.f32();
  parallel_rows(op.dy_THd.rows(), cols, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* dy = dy_data + t * op.dy_THd.row_stride;
      float* dx = dx_data + t * op.dx_TGd.row_stride;
      std::fill_n(dx, op.dx_TGd.cols(), 0.0f);
      for (int64_t h = 0; h < cols / d; ++h) {
        float* sum = dx + h / group * d;
#pragma omp simd
        for (int64_t i = 0; i < d; ++i) sum[i] += dy[h * d + i];
      }
    }
  });
}

}  // namespace sbtrain::ops::cpu
