#include "ops/muon.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/error.h"
#include "ops/cpu/blas.h"
#include "ops/cpu/parallel.h"
#include "ops/memory.h"

namespace sbtrain::ops::cpu {
namespace {

// body(begin, end) on runs of n elements, with all threads.
template <typename Body>
void parallel_runs(int64_t n, const Body& body) {
  constexpr int64_t kRun = 1024;
  parallel_rows((n + kRun - 1) / kRun, kRun,
                [&](int64_t first, int64_t last) { body(first * kRun, std::min(n, last * kRun)); });
}

}  // namespace

void run(Cpu, Stream& s, const MuonMomentum& op) {
  const double* stats = op.stats.f64();
  if (stats[kApply] == 0) {
    if (op.y_N.defined()) run(Cpu(), s, Fill{.x = op.y_N, .value = 0.0f});
    return;
  }
  const auto scale = static_cast<float>(stats[kGradScale]);
  const float momentum = op.momentum;
  const bool nesterov = op.nesterov;
  float* m = op.m_N.f32();
  const float* grad = op.grad_N.f32();
  float* y = op.y_N.defined() ? op.y_N.f32() : nullptr;
  parallel_runs(op.m_N.numel(), [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) m[i] = momentum * m[i] + scale * grad[i];
    if (y == nullptr) return;
    for (int64_t i = begin; i < end; ++i) {
      y[i] = nesterov ? scale * grad[i] + momentum * m[i] : m[i];
    }
  });
}

void run(Cpu, Stream& s, const Normalize& op, const Buffer& /*scratch*/) {
  double square = 0;
  const Tensor square_1(&square, DType::kF64, {1});
  run(Cpu(), s, AddSquaredNorm{.y_1 = square_1, .x = op.x_N}, Buffer());
  const float factor =
      square > 0 ? static_cast<float>(1 / (double{op.margin} * std::sqrt(square))) : 0.0f;
  float* y = op.y_N.f32();
  const float* x = op.x_N.f32();
  parallel_runs(op.x_N.numel(), [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) y[i] = factor * x[i];
  });
}

void run(Cpu, Stream& s, const Orthogonalize& op, const Orthogonalize::Scratch& scratch) {
  const int64_t rows = op.x_NK.rows(), cols = op.x_NK.cols();
  const bool wide = rows <= cols;  // A = X X^T is the smaller one
  const int64_t least = std::min(rows, cols);
  float* x = scratch.x_NK.tensor().f32();
  float* next = op.x_NK.f32();
  float* a = scratch.a.tensor().f32();
  float* b = scratch.b.tensor().f32();
  const int64_t count = rows * cols;
  run(Cpu(), s,
      Normalize{.y_N = scratch.x_NK.tensor().reshaped({count}),
                .x_N = op.x_NK.reshaped({count}),
                .margin = Orthogonalize::kMargin},
      Buffer());
  for (const auto& [c1, c3, c5] : Orthogonalize::kCoefficients) {
    gemm(wide ? Transpose::kNo : Transpose::kYes, wide ? Transpose::kYes : Transpose::kNo, least,
         least, wide ? cols : rows, 1.0f, x, cols, x, cols, 0.0f, a, least);
    std::copy_n(a, least * least, b);
    gemm(Transpose::kNo, Transpose::kNo, least, least, least, c5, a, least, a, least, c3, b, least);
    std::copy_n(x, count, next);
    if (wide) {
      gemm(Transpose::kNo, Transpose::kNo, rows, cols, rows, 1.0f, b, rows, x, cols, c1, next,
           cols);
    } else {
      gemm(Transpose::kNo, Transpose::kNo, rows, cols, cols, 1.0f, x, cols, b, cols, c1, next,
           cols);
    }
    std::swap(x, next);
  }
  static_assert(Orthogonalize::kSteps % 2 == 1, "the last step writes where x was given");
}

void run(Cpu, Stream& s, const MuonUpdate& op) {
  if (op.stats.f64()[kApply] == 0) return;
  float* w = op.w_N.f32();
  const float* y = op.y_N.f32();
  const float lr = op.lr, scale = op.scale, decay = op.decay;
  parallel_runs(op.w_N.numel(), [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) w[i] -= lr * (scale * y[i] + decay * w[i]);
  });
  if (op.compute_N.defined()) run(Cpu(), s, Copy{.y = op.compute_N, .x = op.w_N});
}

}  // namespace sbtrain::ops::cpu
