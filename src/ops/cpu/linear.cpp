#include "ops/cpu/blas.h"
#include "ops/cpu/cpu.h"
#include "ops/cpu/token_sums.h"

namespace sbtrain::ops::cpu {

void linear(Stream& s, Tensor y_TN, Tensor x_TK, Tensor w_NK, const LinearOptions& options) {
  const Tensor& residual = options.residual;
  if (residual.defined() && residual.data != y_TN.data) copy(s, y_TN, residual);
  gemm(Transpose::kNo, Transpose::kYes, y_TN.rows(), y_TN.cols(), x_TK.cols(), options.alpha,
       x_TK.f32(), x_TK.row_stride, w_NK.f32(), w_NK.row_stride, residual.defined() ? 1.0f : 0.0f,
       y_TN.f32(), y_TN.row_stride);
}

void linear_backward_input(Stream& /*s*/, Tensor dx_TK, Tensor dy_TN, Tensor w_NK, float alpha,
                           bool accumulate) {
  gemm(Transpose::kNo, Transpose::kNo, dx_TK.rows(), dx_TK.cols(), dy_TN.cols(), alpha, dy_TN.f32(),
       dy_TN.row_stride, w_NK.f32(), w_NK.row_stride, accumulate ? 1.0f : 0.0f, dx_TK.f32(),
       dx_TK.row_stride);
}

void linear_backward_weight(Stream& /*s*/, Tensor dw_NK, Tensor dy_TN, Tensor x_TK, float alpha) {
  gemm(Transpose::kYes, Transpose::kNo, dw_NK.rows(), dw_NK.cols(), dy_TN.rows(), alpha,
       dy_TN.f32(), dy_TN.row_stride, x_TK.f32(), x_TK.row_stride, 1.0f, dw_NK.f32(),
       dw_NK.row_stride);
}

void bias_backward(Stream& s, Tensor db_N, Tensor dy_TN) {
  const int64_t cols = dy_TN.cols();
  const float* dy_data = dy_TN.f32();
  float* db = db_N.f32();
  const auto body = [&](float* sums, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* dy = dy_data + t * dy_TN.row_stride;
#pragma omp simd
      for (int64_t i = 0; i < cols; ++i) sums[i] += dy[i];
    }
  };
  sum_over_tokens(s, dy_TN.rows(), cols, body, [&](const float* sums, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) db[i] += sums[i];
  });
}

}  // namespace sbtrain::ops::cpu
