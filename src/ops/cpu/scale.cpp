#include "ops/scale.h"

#include "ops/cpu/token_sums.h"

namespace sbtrain::ops::cpu {

void run(Cpu, Stream& /*s*/, const Scale& op) {
  const int64_t width = op.x_TD.cols();
  float* y_data = op.y_TD.f32();
  const float* x_data = op.x_TD.f32();
  const float* w = op.w_D.f32();
  parallel_rows(op.x_TD.rows(), width, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* x = x_data + t * op.x_TD.row_stride;
      float* y = y_data + t * op.y_TD.row_stride;
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) y[i] = x[i] * w[i];
    }
  });
}

void run(Cpu, Stream& /*s*/, const ScaleBackward& op, const Buffer& scratch) {
  const int64_t width = op.x_TD.cols();
  float* dx_data = op.dx_TD.f32();
  float* dw = op.dw_D.f32();
  const float* dy_data = op.dy_TD.f32();
  const float* x_data = op.x_TD.f32();
  const float* w = op.w_D.f32();
  const auto body = [&](float* sums, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* x = x_data + t * op.x_TD.row_stride;
      const float* dy = dy_data + t * op.dy_TD.row_stride;
      float* dx = dx_data + t * op.dx_TD.row_stride;
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) {
        sums[i] += dy[i] * x[i];
        dx[i] = dy[i] * w[i];
      }
    }
  };
  sum_over_tokens(scratch, op.x_TD.rows(), width, body,
                  [&](const float* sums, int64_t first, int64_t last) {
                    for (int64_t i = first; i < last; ++i) dw[i] += sums[i];
                  });
}

}  // namespace sbtrain::ops::cpu
