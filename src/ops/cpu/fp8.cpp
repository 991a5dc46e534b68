// The emulation of fp8 products: the same roundings of factors, sums in f32.
#include "ops/fp8.h"

#include <array>
#include <cmath>
#include <vector>

#include "core/fp8.h"
#include "ops/cpu/blas.h"
#include "ops/cpu/parallel.h"
#include "ops/memory.h"

namespace sbtrain::ops::cpu {
namespace {

// As the bit patterns of nonnegative numbers are ordered, with NaN above all of them.
float larger(float a, float b) {
  return !(a >= b) ? (a != a ? a : b) : a;
}

void widen(const Tensor& y, const Tensor& x) {
  std::array<float, 256> values{};
  for (int i = 0; i < 256; ++i) values[i] = fp8_to_f32(static_cast<uint8_t>(i), x.dtype);
  parallel_runs(y, y.f32(), x, x.fp8(), [&](float* out, const uint8_t* in, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = values[in[i]];
  });
}

}  // namespace

void run(Cpu, Stream& /*s*/, const Amax& op) {
  const int64_t rows = op.x_RC.rows(), cols = op.x_RC.cols();
  const float* x_data = op.x_RC.f32();
  std::vector<float> of_row(static_cast<size_t>(rows), 0.0f);
  parallel_rows(rows, cols, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* x = x_data + r * op.x_RC.row_stride;
      float amax = 0;
      for (int64_t c = 0; c < cols; ++c) amax = larger(amax, std::fabs(x[c]));
      of_row[static_cast<size_t>(r)] = amax;
    }
  });
  float amax = 0;
  for (const float row : of_row) amax = larger(amax, row);
  *op.amax_1.f32() = amax;
}

void run(Cpu, Stream& /*s*/, const CastFp8& op) {
  const DType dtype = op.dtype();
  const float scale = fp8_scale(*op.amax_1.f32(), dtype);
  *op.inverse_scale_1.f32() = 1.0f / scale;
  const float* x_data = op.x_RC.f32();
  const int64_t cols = op.x_RC.cols();
  parallel_rows(op.x_RC.rows(), cols, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* x = x_data + r * op.x_RC.row_stride;
      for (int64_t c = 0; c < cols; ++c) {
        const uint8_t y = f32_to_fp8(x[c] * scale, dtype);
        if (op.y_RC.defined()) op.y_RC.fp8()[r * op.y_RC.row_stride + c] = y;
        if (op.y_CR.defined()) op.y_CR.fp8()[c * op.y_CR.row_stride + r] = y;
      }
    }
  });
}

void run(Cpu, Stream& /*s*/, const Fp8Scales& op) {
  for (int64_t n = 0; n < op.x_WN.cols(); ++n) {
    float amax = 0;
    for (int64_t w = 0; w < op.x_WN.rows(); ++w) {
      amax = larger(amax, op.x_WN.f32()[w * op.x_WN.row_stride + n]);
    }
    op.amax_N.f32()[n] = amax;
    op.inverse_scale_N1.f32()[n * op.inverse_scale_N1.row_stride] =
        1.0f / fp8_scale(amax, DType::kE4M3);
  }
}

void run(Cpu, Stream& /*s*/, const TransposeFp8& op) {
  const Tensor &x = op.x_RC, &y = op.y_CR;
  parallel_rows(y.rows(), y.cols(), [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      for (int64_t r = 0; r < y.cols(); ++r) {
        y.fp8()[c * y.row_stride + r] = x.fp8()[r * x.row_stride + c];
      }
    }
  });
}

void run(Cpu, Stream& s, const Fp8Product& op, const Fp8Product::Scratch& scratch) {
  const Tensor &a = scratch.a_MK, &b = scratch.b_NK;
  widen(a, op.a_MK.x);
  widen(b, op.b_NK.x);
  const Tensor& residual = op.residual;
  if (residual.defined() && residual.data != op.y_MN.data) {
    run(Cpu(), s, Copy{.y = op.y_MN, .x = residual});
  }
  const float alpha = op.alpha * (*op.a_MK.inverse_scale_1.f32() * *op.b_NK.inverse_scale_1.f32());
  gemm(Transpose::kNo, Transpose::kYes, op.y_MN.rows(), op.y_MN.cols(), a.cols(), alpha, a.f32(),
       a.row_stride, b.f32(), b.row_stride, residual.defined() ? 1.0f : 0.0f, op.y_MN.f32(),
       op.y_MN.row_stride);
}

}  // namespace sbtrain::ops::cpu
