#include "ops/activation.h"

#include <cmath>

#include "ops/cpu/parallel.h"
#include "ops/cpu/simd.h"
#include "ops/fp8.h"

namespace sbtrain::ops::cpu {
namespace {

const float kSqrtHalf = std::sqrt(0.5f);

// The tanh form of GELU is z sigmoid(2u), u = sqrt(2/pi) (z + c z^3), since (1 + tanh(u)) / 2 =
// sigmoid(2u). Beyond +-20 the sigmoid is 0 or 1, and z^3 need not be formed.
constexpr float kTwiceRoot = 1.59576912f;  // 2 sqrt(2/pi)
constexpr float kCubic = 0.044715f;
constexpr float kFar = 20.0f;

float bounded(float z) {
  return z < -kFar ? -kFar : (z > kFar ? kFar : z);
}

float twice_u(float z) {
  return kTwiceRoot * z * (1.0f + kCubic * z * z);
}

void tanh_gelu(float* y, const float* x, const float* b, int64_t cols) {
#pragma omp simd
  for (int64_t i = 0; i < cols; ++i) {
    const float z = x[i] + b[i];
    y[i] = z * simd::sigmoid(twice_u(bounded(z)));
  }
}

// (z s)' = s + z s (1 - s) (2u)', s = sigmoid(2u); 1 - s = sigmoid(-2u) without cancellation.
void tanh_gelu_backward(float* dx, const float* dy, const float* x, const float* b, int64_t cols) {
#pragma omp simd
  for (int64_t i = 0; i < cols; ++i) {
    const float z = bounded(x[i] + b[i]);
    const float s = simd::sigmoid(twice_u(z));
    const float complement = simd::sigmoid(-twice_u(z));
    const float slope = kTwiceRoot * (1.0f + 3.0f * kCubic * z * z);
    dx[i] = dy[i] * (s + z * s * complement * slope);
  }
}

}  // namespace

void run(Cpu, Stream& s, const Swiglu& op) {
  const int64_t inner = op.y_TF.cols();
  float* y_data = op.y_TF.f32();
  const float* gate_up = op.gate_up_T2F.f32();
  parallel_rows(op.y_TF.rows(), inner, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* y = y_data + t * op.y_TF.row_stride;
      const float* gate = gate_up + t * op.gate_up_T2F.row_stride;
      const float* up = gate + inner;
#pragma omp simd
      for (int64_t i = 0; i < inner; ++i) y[i] = gate[i] * simd::sigmoid(gate[i]) * up[i];
    }
  });
  if (op.amax_1.defined()) run(Cpu(), s, Amax{.amax_1 = op.amax_1, .x_RC = op.y_TF});
}

// silu(g)' = sigmoid(g) (1 + g (1 - sigmoid(g))), and 1 - sigmoid(g) = sigmoid(-g).
void run(Cpu, Stream& s, const SwigluBackward& op) {
  const int64_t inner = op.dy_TF.cols();
  float* dgate_up = op.dgate_up_T2F.f32();
  const float* dy_data = op.dy_TF.f32();
  const float* gate_up = op.gate_up_T2F.f32();
  parallel_rows(op.dy_TF.rows(), 2 * inner, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* gate = gate_up + t * op.gate_up_T2F.row_stride;
      const float* up = gate + inner;
      const float* dy = dy_data + t * op.dy_TF.row_stride;
      float* dgate = dgate_up + t * op.dgate_up_T2F.row_stride;
      float* dup = dgate + inner;
#pragma omp simd
      for (int64_t i = 0; i < inner; ++i) {
        const float g = gate[i];
        const float e = simd::exp(-simd::abs(g));
        const float larger = 1.0f / (1.0f + e);  // sigmoid(|g|)
        const float smaller = e * larger;        // sigmoid(-|g|)
        const float sigmoid = g < 0.0f ? smaller : larger;
        const float complement = g < 0.0f ? larger : smaller;
        const float dsilu = sigmoid * (1.0f + g * complement);
        const float u = up[i];
        dup[i] = dy[i] * g * sigmoid;
        dgate[i] = dy[i] * u * dsilu;
      }
    }
  });
  if (op.amax_1.defined()) run(Cpu(), s, Amax{.amax_1 = op.amax_1, .x_RC = op.dgate_up_T2F});
}

void run(Cpu, Stream& /*s*/, const BiasSigmoid& op) {
  const int64_t cols = op.x_TH.cols();
  float* y_data = op.y_TH.f32();
  const float* x_data = op.x_TH.f32();
  const float* b = op.b_H.f32();
  parallel_rows(op.x_TH.rows(), cols, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* y = y_data + t * op.y_TH.row_stride;
      const float* x = x_data + t * op.x_TH.row_stride;
#pragma omp simd
      for (int64_t i = 0; i < cols; ++i) y[i] = simd::sigmoid(x[i] + b[i]);
    }
  });
}

void run(Cpu, Stream& /*s*/, const SigmoidBackward& op) {
  const int64_t cols = op.y_TH.cols();
  float* dx_data = op.dx_TH.f32();
  const float* dy_data = op.dy_TH.f32();
  const float* y_data = op.y_TH.f32();
  parallel_rows(op.y_TH.rows(), cols, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* dx = dx_data + t * op.dx_TH.row_stride;
      const float* dy = dy_data + t * op.dy_TH.row_stride;
      const float* y = y_data + t * op.y_TH.row_stride;
#pragma omp simd
      for (int64_t i = 0; i < cols; ++i) dx[i] = dy[i] * y[i] * (1.0f - y[i]);
    }
  });
}

void run(Cpu, Stream& /*s*/, const BiasGelu& op) {
  const int64_t cols = op.x_TF.cols();
  const float* b = op.b_F.f32();
  parallel_rows(op.x_TF.rows(), 8 * cols, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* x = op.x_TF.f32() + t * op.x_TF.row_stride;
      float* y = op.y_TF.f32() + t * op.y_TF.row_stride;
      if (op.tanh_form) {
        tanh_gelu(y, x, b, cols);
        continue;
      }
      for (int64_t i = 0; i < cols; ++i) {
        const float z = x[i] + b[i];
        y[i] = 0.5f * z * std::erfc(-z * kSqrtHalf);
      }
    }
  });
}

// gelu'(z) = Phi(z) + z phi(z) of the exact form.
void run(Cpu, Stream& /*s*/, const BiasGeluBackward& op) {
  constexpr float kDensity = 0.398942280f;  // 1 / sqrt(2 pi)
  const int64_t cols = op.x_TF.cols();
  const float* b = op.b_F.f32();
  parallel_rows(op.x_TF.rows(), 16 * cols, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* x = op.x_TF.f32() + t * op.x_TF.row_stride;
      const float* dy = op.dy_TF.f32() + t * op.dy_TF.row_stride;
      float* dx = op.dx_TF.f32() + t * op.dx_TF.row_stride;
      if (op.tanh_form) {
        tanh_gelu_backward(dx, dy, x, b, cols);
        continue;
      }
      for (int64_t i = 0; i < cols; ++i) {
        const float z = x[i] + b[i];
        const float below = 0.5f * std::erfc(-z * kSqrtHalf);
        dx[i] = dy[i] * (below + z * kDensity * std::exp(-0.5f * z * z));
      }
    }
  });
}

}  // namespace sbtrain::ops::cpu
