#include <cmath>

#include "ops/cpu/cpu.h"
#include "ops/cpu/token_sums.h"

namespace sbtrain::ops::cpu {
namespace {

float dot(const float* a, const float* b, int64_t n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

float dot(const float* a, const float* b, const float* c, int64_t n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i] * c[i];
  return sum;
}

// Mean and 1 / sqrt(variance + eps) of n channels.
struct Moments {
  float mean;
  float inverse_std;
};
Moments moments(const float* x, int64_t n, float eps) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += x[i];
  const float mean = sum / static_cast<float>(n);
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < n; ++i) squares += (x[i] - mean) * (x[i] - mean);
  return {mean, 1.0f / std::sqrt(squares / static_cast<float>(n) + eps)};
}

float inverse_rms(const float* x, int64_t n, float eps) {
  return 1.0f / std::sqrt(dot(x, x, n) / static_cast<float>(n) + eps);
}

}  // namespace

void rmsnorm(Stream& /*s*/, Tensor y_TD, Tensor x_TD, Tensor w_D, float eps) {
  const int64_t width = x_TD.cols();
  float* y_data = y_TD.f32();
  const float* x_data = x_TD.f32();
  const float* w = w_D.f32();
  parallel_rows(x_TD.rows(), width, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* x = x_data + t * x_TD.row_stride;
      float* y = y_data + t * y_TD.row_stride;
      const float r = inverse_rms(x, width, eps);
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) y[i] = x[i] * r * w[i];
    }
  });
}

// With r = 1/rms(x), xhat = r x and g = w dy:  dx = r (g - xhat mean(g xhat)),  dw = sum_t dy xhat.
void rmsnorm_backward(Stream& s, Tensor dx_TD, Tensor dw_D, Tensor dy_TD, Tensor x_TD, Tensor w_D,
                      float eps) {
  const int64_t width = x_TD.cols();
  float* dx_data = dx_TD.f32();
  float* dw = dw_D.f32();
  const float* dy_data = dy_TD.f32();
  const float* x_data = x_TD.f32();
  const float* w = w_D.f32();
  const auto body = [&](float* dw_sums, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* x = x_data + t * x_TD.row_stride;
      const float* dy = dy_data + t * dy_TD.row_stride;
      float* dx = dx_data + t * dx_TD.row_stride;
      const float r = inverse_rms(x, width, eps);
      const float mean = dot(dy, w, x, width) * r / static_cast<float>(width);
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) {
        const float normed = x[i] * r;
        dw_sums[i] += dy[i] * normed;
        dx[i] += r * (dy[i] * w[i] - normed * mean);
      }
    }
  };
  sum_over_tokens(s, x_TD.rows(), width, body, [&](const float* sums, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) dw[i] += sums[i];
  });
}

void head_norm(Stream& /*s*/, Tensor y_THd, Tensor x_THd, Tensor w_Hd, Tensor b_Hd, int heads,
               float eps) {
  const int64_t head_dim = x_THd.cols() / heads;
  float* y_data = y_THd.f32();
  const float* x_data = x_THd.f32();
  const float* w_data = w_Hd.f32();
  const float* b_data = b_Hd.f32();
  parallel_rows(x_THd.rows(), x_THd.cols(), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t c = 0; c < x_THd.cols(); c += head_dim) {
        const float* x = x_data + t * x_THd.row_stride + c;
        float* y = y_data + t * y_THd.row_stride + c;
        const float* w = w_data + c;
        const float* b = b_data + c;
        const Moments m = moments(x, head_dim, eps);
        const float mean = m.mean;
        const float r = m.inverse_std;
#pragma omp simd
        for (int64_t i = 0; i < head_dim; ++i) y[i] = (x[i] - mean) * r * w[i] + b[i];
      }
    }
  });
}

// With xhat = (x - mean) r and g = w dy:  dx = r (g - mean(g) - xhat mean(g xhat)),
// dw = sum_t dy xhat,  db = sum_t dy.
void head_norm_backward(Stream& s, Tensor dx_THd, Tensor dw_Hd, Tensor db_Hd, Tensor dy_THd,
                        Tensor x_THd, Tensor w_Hd, int heads, float eps) {
  const int64_t cols = x_THd.cols();
  const int64_t head_dim = cols / heads;
  float* dx_data = dx_THd.f32();
  float* dw = dw_Hd.f32();
  float* db = db_Hd.f32();
  const float* dy_data = dy_THd.f32();
  const float* x_data = x_THd.f32();
  const float* w_data = w_Hd.f32();
  const auto one_head = [&](int64_t t, int64_t c, float* dw_sums, float* db_sums) {
    const float* x = x_data + t * x_THd.row_stride + c;
    const float* dy = dy_data + t * dy_THd.row_stride + c;
    float* dx = dx_data + t * dx_THd.row_stride + c;
    const float* w = w_data + c;
    const Moments m = moments(x, head_dim, eps);
    const float mean = m.mean;
    const float r = m.inverse_std;
    float g_sum = 0;
    float projection = 0;
#pragma omp simd reduction(+ : g_sum, projection)
    for (int64_t i = 0; i < head_dim; ++i) {
      g_sum += dy[i] * w[i];
      projection += dy[i] * w[i] * (x[i] - mean);
    }
    const float g_mean = g_sum / static_cast<float>(head_dim);
    const float projection_mean = projection * r / static_cast<float>(head_dim);
#pragma omp simd
    for (int64_t i = 0; i < head_dim; ++i) {
      const float normed = (x[i] - mean) * r;
      dw_sums[i] += dy[i] * normed;
      db_sums[i] += dy[i];
      dx[i] = r * (dy[i] * w[i] - g_mean - normed * projection_mean);
    }
  };
  const auto body = [&](float* sums, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t c = 0; c < cols; c += head_dim) one_head(t, c, sums + c, sums + cols + c);
    }
  };
  // The first `cols` sums belong to dw, the others to db.
  sum_over_tokens(s, x_THd.rows(), 2 * cols, body,
                  [&](const float* sums, int64_t first, int64_t last) {
                    for (int64_t i = first; i < last; ++i) {
                      float& target = i < cols ? dw[i] : db[i - cols];
                      target += sums[i];
                    }
                  });
}

}  // namespace sbtrain::ops::cpu
