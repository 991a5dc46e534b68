#include "ops/linear.h"

#include "ops/activation.h"
#include "ops/cpu/blas.h"
#include "ops/cpu/token_sums.h"
#include "ops/memory.h"
#include "ops/norm.h"

namespace sbtrain::ops::cpu {

void run(Cpu, Stream& s, const Linear& op, const Buffer& /*workspace*/) {
  const Tensor& residual = op.residual;
  if (residual.defined() && residual.data != op.y_TN.data) {
    run(Cpu(), s, Copy{.y = op.y_TN, .x = residual});
  }
  if (op.y_TN.rows() <= kSkinnyRows) {
    skinny_gemm(op.y_TN.rows(), op.y_TN.cols(), op.x_TK.cols(), op.alpha, op.x_TK.f32(),
                op.x_TK.row_stride, op.w_NK.f32(), op.w_NK.row_stride, residual.defined(),
                op.y_TN.f32(), op.y_TN.row_stride);
    return;
  }
  gemm(Transpose::kNo, Transpose::kYes, op.y_TN.rows(), op.y_TN.cols(), op.x_TK.cols(), op.alpha,
       op.x_TK.f32(), op.x_TK.row_stride, op.w_NK.f32(), op.w_NK.row_stride,
       residual.defined() ? 1.0f : 0.0f, op.y_TN.f32(), op.y_TN.row_stride);
}

void run(Cpu, Stream& s, const DecodeLinear& op, const DecodeLinear::Scratch& scratch) {
  const Tensor x = op.norm_K.defined() ? scratch.normed_BK.tensor() : op.x_BK;
  const Tensor y = op.swiglu ? scratch.gate_up_B2N.tensor() : op.y_BN;
  if (op.norm_K.defined()) {
    run(Cpu(), s, RmsNorm{.y_TD = x, .x_TD = op.x_BK, .w_D = op.norm_K, .eps = op.norm_eps});
  }
  run(Cpu(), s,
      Linear{.y_TN = y, .x_TK = x, .w_NK = op.w_NK, .alpha = op.alpha, .residual = op.residual},
      scratch.workspace);
  if (op.swiglu) run(Cpu(), s, Swiglu{.y_TF = op.y_BN, .gate_up_T2F = y});
}

void run(Cpu, Stream& /*s*/, const LinearBackward& op, const LinearBackward::Scratch& /*scratch*/) {
  const int64_t tokens = op.dy_TN.rows(), n = op.dy_TN.cols();
  if (op.dw_NK.defined()) {
    gemm(Transpose::kYes, Transpose::kNo, n, op.dw_NK.cols(), tokens, op.alpha, op.dy_TN.f32(),
         op.dy_TN.row_stride, op.x_TK.f32(), op.x_TK.row_stride, op.accumulate_dw ? 1.0f : 0.0f,
         op.dw_NK.f32(), op.dw_NK.row_stride);
  }
  if (op.dx_TK.defined()) {
    gemm(Transpose::kNo, Transpose::kNo, tokens, op.dx_TK.cols(), n, op.alpha, op.dy_TN.f32(),
         op.dy_TN.row_stride, op.w_NK.f32(), op.w_NK.row_stride, op.accumulate_dx ? 1.0f : 0.0f,
         op.dx_TK.f32(), op.dx_TK.row_stride);
  }
}

void run(Cpu, Stream& /*s*/, const AddBias& op) {
  const int64_t cols = op.y_TN.cols();
  float* y_data = op.y_TN.f32();
  const float* b = op.b_N.f32();
  parallel_rows(op.y_TN.rows(), cols, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* y = y_data + t * op.y_TN.row_stride;
#pragma omp simd
      for (int64_t i = 0; i < cols; ++i) y[i] += b[i];
    }
  });
}

void run(Cpu, Stream& /*s*/, const BiasBackward& op, const Buffer& scratch) {
  const int64_t cols = op.dy_TN.cols();
  const float* dy_data = op.dy_TN.f32();
  float* db = op.db_N.f32();
  const auto body = [&](float* sums, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* dy = dy_data + t * op.dy_TN.row_stride;
#pragma omp simd
      for (int64_t i = 0; i < cols; ++i) sums[i] += dy[i];
    }
  };
  sum_over_tokens(scratch, op.dy_TN.rows(), cols, body,
                  [&](const float* sums, int64_t first, int64_t last) {
                    for (int64_t i = first; i < last; ++i) db[i] += sums[i];
                  });
}

}  // namespace sbtrain::ops::cpu
