#include "ops/cpu/cpu.h"
#include "ops/cpu/parallel.h"
#include "ops/cpu/simd.h"

namespace sbtrain::ops::cpu {

void swiglu(Stream& /*s*/, Tensor y_TF, Tensor gate_up_T2F) {
  const int64_t inner = y_TF.cols();
  float* y_data = y_TF.f32();
  const float* gate_up = gate_up_T2F.f32();
  parallel_rows(y_TF.rows(), inner, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* y = y_data + t * y_TF.row_stride;
      const float* gate = gate_up + t * gate_up_T2F.row_stride;
      const float* up = gate + inner;
#pragma omp simd
      for (int64_t i = 0; i < inner; ++i) y[i] = gate[i] * simd::sigmoid(gate[i]) * up[i];
    }
  });
}

// silu(g)' = sigmoid(g) (1 + g (1 - sigmoid(g))), and 1 - sigmoid(g) = sigmoid(-g).
void swiglu_backward(Stream& /*s*/, Tensor dgate_up_T2F, Tensor dy_TF, Tensor gate_up_T2F) {
  const int64_t inner = dy_TF.cols();
  float* dgate_up = dgate_up_T2F.f32();
  const float* dy_data = dy_TF.f32();
  const float* gate_up = gate_up_T2F.f32();
  parallel_rows(dy_TF.rows(), 2 * inner, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* gate = gate_up + t * gate_up_T2F.row_stride;
      const float* up = gate + inner;
      const float* dy = dy_data + t * dy_TF.row_stride;
      float* dgate = dgate_up + t * dgate_up_T2F.row_stride;
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
}

void bias_sigmoid(Stream& /*s*/, Tensor y_TH, Tensor x_TH, Tensor b_H) {
  const int64_t cols = x_TH.cols();
  float* y_data = y_TH.f32();
  const float* x_data = x_TH.f32();
  const float* b = b_H.f32();
  parallel_rows(x_TH.rows(), cols, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* y = y_data + t * y_TH.row_stride;
      const float* x = x_data + t * x_TH.row_stride;
#pragma omp simd
      for (int64_t i = 0; i < cols; ++i) y[i] = simd::sigmoid(x[i] + b[i]);
    }
  });
}

void sigmoid_backward(Stream& /*s*/, Tensor dx_TH, Tensor dy_TH, Tensor y_TH) {
  const int64_t cols = y_TH.cols();
  float* dx_data = dx_TH.f32();
  const float* dy_data = dy_TH.f32();
  const float* y_data = y_TH.f32();
  parallel_rows(y_TH.rows(), cols, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* dx = dx_data + t * dx_TH.row_stride;
      const float* dy = dy_data + t * dy_TH.row_stride;
      const float* y = y_data + t * y_TH.row_stride;
#pragma omp simd
      for (int64_t i = 0; i < cols; ++i) dx[i] = dy[i] * y[i] * (1.0f - y[i]);
    }
  });
}

}  // namespace sbtrain::ops::cpu
