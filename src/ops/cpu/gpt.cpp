#include <cmath>

#include "ops/cpu/cpu.h"
#include "ops/cpu/token_sums.h"

namespace sbtrain::ops::cpu {
namespace {

// Mean and 1 / sqrt(variance + eps) of n channels.
struct Moments {
  Moments(const float* x, int64_t n, float eps) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) sum += x[i];
    const float center = sum / static_cast<float>(n);
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < n; ++i) squares += (x[i] - center) * (x[i] - center);
    mean = center;
    inverse_std = 1.0f / std::sqrt(squares / static_cast<float>(n) + eps);
  }
  float mean, inverse_std;
};

const float kSqrtHalf = std::sqrt(0.5f);

}  // namespace

void layernorm(Stream& /*s*/, Tensor y_TD, Tensor x_TD, Tensor w_D, Tensor b_D, float eps) {
  const int64_t width = x_TD.cols();
  float* y_data = y_TD.f32();
  const float* x_data = x_TD.f32();
  const float* w = w_D.f32();
  const float* b = b_D.f32();
  parallel_rows(x_TD.rows(), width, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* x = x_data + t * x_TD.row_stride;
      float* y = y_data + t * y_TD.row_stride;
      const Moments m(x, width, eps);
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) y[i] = (x[i] - m.mean) * m.inverse_std * w[i] + b[i];
    }
  });
}

// With xhat = (x - mean) r and g = w dy:  dx = r (g - mean(g) - xhat mean(g xhat)),
// dw = sum_t dy xhat,  db = sum_t dy.
void layernorm_backward(Stream& s, Tensor dx_TD, Tensor dw_D, Tensor db_D, Tensor dy_TD,
                        Tensor x_TD, Tensor w_D, float eps, bool accumulate) {
  const int64_t width = x_TD.cols();
  const auto columns = static_cast<float>(width);
  float* dx_data = dx_TD.f32();
  float* dw = dw_D.f32();
  float* db = db_D.f32();
  const float* dy_data = dy_TD.f32();
  const float* x_data = x_TD.f32();
  const float* w = w_D.f32();
  const auto body = [&](float* sums, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* x = x_data + t * x_TD.row_stride;
      const float* dy = dy_data + t * dy_TD.row_stride;
      float* dx = dx_data + t * dx_TD.row_stride;
      const Moments m(x, width, eps);
      float g_sum = 0;
      float projection = 0;
#pragma omp simd reduction(+ : g_sum, projection)
      for (int64_t i = 0; i < width; ++i) {
        g_sum += dy[i] * w[i];
        projection += dy[i] * w[i] * (x[i] - m.mean);
      }
      const float g_mean = g_sum / columns;
      const float projection_mean = projection * m.inverse_std / columns;
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) {
        const float normed = (x[i] - m.mean) * m.inverse_std;
        sums[i] += dy[i] * normed;
        sums[width + i] += dy[i];
        const float gradient = m.inverse_std * (dy[i] * w[i] - g_mean - normed * projection_mean);
        dx[i] = accumulate ? dx[i] + gradient : gradient;
      }
    }
  };
  // The first `width` sums belong to dw, the others to db.
  sum_over_tokens(s, x_TD.rows(), 2 * width, body,
                  [&](const float* sums, int64_t first, int64_t last) {
                    for (int64_t i = first; i < last; ++i) {
                      float& target = i < width ? dw[i] : db[i - width];
                      target += sums[i];
                    }
                  });
}

void add_bias(Stream& /*s*/, Tensor y_TN, Tensor b_N) {
  const int64_t cols = y_TN.cols();
  float* y_data = y_TN.f32();
  const float* b = b_N.f32();
  parallel_rows(y_TN.rows(), cols, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* y = y_data + t * y_TN.row_stride;
#pragma omp simd
      for (int64_t i = 0; i < cols; ++i) y[i] += b[i];
    }
  });
}

void bias_gelu(Stream& /*s*/, Tensor y_TF, Tensor x_TF, Tensor b_F) {
  const int64_t cols = x_TF.cols();
  const float* b = b_F.f32();
  parallel_rows(x_TF.rows(), 8 * cols, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* x = x_TF.f32() + t * x_TF.row_stride;
      float* y = y_TF.f32() + t * y_TF.row_stride;
      for (int64_t i = 0; i < cols; ++i) {
        const float z = x[i] + b[i];
        y[i] = 0.5f * z * std::erfc(-z * kSqrtHalf);
      }
    }
  });
}

// gelu'(z) = Phi(z) + z phi(z).
void bias_gelu_backward(Stream& /*s*/, Tensor dx_TF, Tensor dy_TF, Tensor x_TF, Tensor b_F) {
  constexpr float kDensity = 0.398942280f;  // 1 / sqrt(2 pi)
  const int64_t cols = x_TF.cols();
  const float* b = b_F.f32();
  parallel_rows(x_TF.rows(), 16 * cols, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* x = x_TF.f32() + t * x_TF.row_stride;
      const float* dy = dy_TF.f32() + t * dy_TF.row_stride;
      float* dx = dx_TF.f32() + t * dx_TF.row_stride;
      for (int64_t i = 0; i < cols; ++i) {
        const float z = x[i] + b[i];
        const float below = 0.5f * std::erfc(-z * kSqrtHalf);
        dx[i] = dy[i] * (below + z * kDensity * std::exp(-0.5f * z * z));
      }
    }
  });
}

}  // namespace sbtrain::ops::cpu
