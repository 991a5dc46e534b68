#include "ops/norm.h"

#include <cmath>

#include "ops/cpu/token_sums.h"
#include "ops/fp8.h"

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

void run(Cpu, Stream& s, const RmsNorm& op) {
  const int64_t width = op.x_TD.cols();
  float* y_data = op.y_TD.f32();
  const float* x_data = op.x_TD.f32();
  const float* w = op.w_D.f32();
  parallel_rows(op.x_TD.rows(), width, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* x = x_data + t * op.x_TD.row_stride;
      float* y = y_data + t * op.y_TD.row_stride;
      const float r = inverse_rms(x, width, op.eps);
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) y[i] = x[i] * r * w[i];
    }
  });
  if (op.amax_1.defined()) run(Cpu(), s, Amax{.amax_1 = op.amax_1, .x_RC = op.y_TD});
}

// With r = 1/rms(x), xhat = r x and g = w dy:  dx = r (g - xhat mean(g xhat)),  dw = sum_t dy xhat.
void run(Cpu, Stream& s, const RmsNormBackward& op, const Buffer& scratch) {
  const int64_t width = op.x_TD.cols();
  float* dx_data = op.dx_TD.f32();
  float* dw = op.dw_D.f32();
  const float* dy_data = op.dy_TD.f32();
  const float* x_data = op.x_TD.f32();
  const float* w = op.w_D.f32();
  const auto body = [&](float* dw_sums, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* x = x_data + t * op.x_TD.row_stride;
      const float* dy = dy_data + t * op.dy_TD.row_stride;
      float* dx = dx_data + t * op.dx_TD.row_stride;
      const float r = inverse_rms(x, width, op.eps);
      const float mean = dot(dy, w, x, width) * r / static_cast<float>(width);
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) {
        const float normed = x[i] * r;
        dw_sums[i] += dy[i] * normed;
        dx[i] += r * (dy[i] * w[i] - normed * mean);
      }
    }
  };
  sum_over_tokens(scratch, op.x_TD.rows(), width, body,
                  [&](const float* sums, int64_t first, int64_t last) {
                    for (int64_t i = first; i < last; ++i) {
                      dw[i] = (op.accumulate_dw ? dw[i] : 0.0f) + sums[i];
                    }
                  });
  if (op.amax_1.defined()) run(Cpu(), s, Amax{.amax_1 = op.amax_1, .x_RC = op.dx_TD});
}

void run(Cpu, Stream& /*s*/, const LayerNorm& op) {
  const int64_t width = op.x_TD.cols();
  float* y_data = op.y_TD.f32();
  const float* x_data = op.x_TD.f32();
  const float* w = op.w_D.f32();
  const float* b = op.b_D.f32();
  parallel_rows(op.x_TD.rows(), width, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* x = x_data + t * op.x_TD.row_stride;
      float* y = y_data + t * op.y_TD.row_stride;
      const Moments m = moments(x, width, op.eps);
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) y[i] = (x[i] - m.mean) * m.inverse_std * w[i] + b[i];
    }
  });
}

// With xhat = (x - mean) r and g = w dy:  dx = r (g - mean(g) - xhat mean(g xhat)),
// dw = sum_t dy xhat,  db = sum_t dy.
void run(Cpu, Stream& /*s*/, const LayerNormBackward& op, const Buffer& scratch) {
  const int64_t width = op.x_TD.cols();
  const auto columns = static_cast<float>(width);
  float* dx_data = op.dx_TD.f32();
  float* dw = op.dw_D.f32();
  float* db = op.db_D.f32();
  const float* dy_data = op.dy_TD.f32();
  const float* x_data = op.x_TD.f32();
  const float* w = op.w_D.f32();
  const auto body = [&](float* sums, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* x = x_data + t * op.x_TD.row_stride;
      const float* dy = dy_data + t * op.dy_TD.row_stride;
      float* dx = dx_data + t * op.dx_TD.row_stride;
      const Moments m = moments(x, width, op.eps);
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
        dx[i] = op.accumulate ? dx[i] + gradient : gradient;
      }
    }
  };
  // The first `width` sums belong to dw, the others to db.
  sum_over_tokens(scratch, op.x_TD.rows(), 2 * width, body,
                  [&](const float* sums, int64_t first, int64_t last) {
                    for (int64_t i = first; i < last; ++i) {
                      float& target = i < width ? dw[i] : db[i - width];
                      target += sums[i];
                    }
                  });
}

void run(Cpu, Stream& /*s*/, const HeadNorm& op) {
  const int64_t head_dim = op.x_THd.cols() / op.heads;
  float* y_data = op.y_THd.f32();
  const float* x_data = op.x_THd.f32();
  const float* w_data = op.w_Hd.f32();
  const float* b_data = op.b_Hd.f32();
  parallel_rows(op.x_THd.rows(), op.x_THd.cols(), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t c = 0; c < op.x_THd.cols(); c += head_dim) {
        const float* x = x_data + t * op.x_THd.row_stride + c;
        float* y = y_data + t * op.y_THd.row_stride + c;
        const float* w = w_data + c;
        const float* b = b_data + c;
        const Moments m = moments(x, head_dim, op.eps);
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
void run(Cpu, Stream& /*s*/, const HeadNormBackward& op, const Buffer& scratch) {
  const int64_t cols = op.x_THd.cols();
  const int64_t head_dim = cols / op.heads;
  float* dx_data = op.dx_THd.f32();
  float* dw = op.dw_Hd.f32();
  float* db = op.db_Hd.f32();
  const float* dy_data = op.dy_THd.f32();
  const float* x_data = op.x_THd.f32();
  const float* w_data = op.w_Hd.f32();
  const auto one_head = [&](int64_t t, int64_t c, float* dw_sums, float* db_sums) {
    const float* x = x_data + t * op.x_THd.row_stride + c;
    const float* dy = dy_data + t * op.dy_THd.row_stride + c;
    float* dx = dx_data + t * op.dx_THd.row_stride + c;
    const float* w = w_data + c;
    const Moments m = moments(x, head_dim, op.eps);
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
  sum_over_tokens(scratch, op.x_THd.rows(), 2 * cols, body,
                  [&](const float* sums, int64_t first, int64_t last) {
                    for (int64_t i = first; i < last; ++i) {
                      float& target = i < cols ? dw[i] : db[i - cols];
                      target += sums[i];
                    }
                  });
}

void run(Cpu, Stream& /*s*/, const HeadRmsNorm& op) {
  const int64_t cols = op.x_THd.cols();
  const int64_t head_dim = cols / op.heads;
  float* y_data = op.y_THd.f32();
  const float* x_data = op.x_THd.f32();
  const float* w = op.w_d.f32();
  parallel_rows(op.x_THd.rows(), cols, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t c = 0; c < cols; c += head_dim) {
        const float* x = x_data + t * op.x_THd.row_stride + c;
        float* y = y_data + t * op.y_THd.row_stride + c;
        const float r = inverse_rms(x, head_dim, op.eps);
#pragma omp simd
        for (int64_t i = 0; i < head_dim; ++i) y[i] = x[i] * r * w[i];
      }
    }
  });
}

// The formulas of RmsNormBackward, for each head; dw is summed over the heads as well.
void run(Cpu, Stream& /*s*/, const HeadRmsNormBackward& op, const Buffer& scratch) {
  const int64_t cols = op.x_THd.cols();
  const int64_t head_dim = cols / op.heads;
  float* dx_data = op.dx_THd.f32();
  float* dw = op.dw_d.f32();
  const float* dy_data = op.dy_THd.f32();
  const float* x_data = op.x_THd.f32();
  const float* w = op.w_d.f32();
  const auto one_head = [&](int64_t t, int64_t c, float* dw_sums) {
    const float* x = x_data + t * op.x_THd.row_stride + c;
    const float* dy = dy_data + t * op.dy_THd.row_stride + c;
    float* dx = dx_data + t * op.dx_THd.row_stride + c;
    const float r = inverse_rms(x, head_dim, op.eps);
    const float mean = dot(dy, w, x, head_dim) * r / static_cast<float>(head_dim);
#pragma omp simd
    for (int64_t i = 0; i < head_dim; ++i) {
      const float normed = x[i] * r;
      dw_sums[i] += dy[i] * normed;
      dx[i] = r * (dy[i] * w[i] - normed * mean);
    }
  };
  const auto body = [&](float* sums, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t c = 0; c < cols; c += head_dim) one_head(t, c, sums);
    }
  };
  sum_over_tokens(scratch, op.x_THd.rows(), head_dim, body,
                  [&](const float* sums, int64_t first, int64_t last) {
                    for (int64_t i = first; i < last; ++i) dw[i] += sums[i];
                  });
}

}  // namespace sbtrain::ops::cpu
