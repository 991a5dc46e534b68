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

// The steps from x, which is normalised, to `next`; a and b are scratch.
void iterate(float* x, float* next, int64_t rows, int64_t cols, float* a, float* b) {
  const bool wide = rows <= cols;  // A = X X^T is the smaller one
  const int64_t least = std::min(rows, cols);
  const int64_t count = rows * cols;
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
  const int64_t n = op.x_N.numel() / op.batch;
  for (int64_t part = 0; part < op.batch; ++part) {
    const Tensor part_N = op.x_N.row_range(part * n, n);
    double square = 0;
    const Tensor square_1(&square, DType::kF64, {1});
    run(Cpu(), s, AddSquaredNorm{.y_1 = square_1, .x = part_N}, Buffer());
    const float factor =
        square > 0 ? static_cast<float>(1 / (double{op.margin} * std::sqrt(square))) : 0.0f;
    float* y = op.y_N.f32() + part * n;
    const float* x = part_N.f32();
    parallel_runs(n, [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) y[i] = factor * x[i];
    });
  }
}

void run(Cpu, Stream& s, const Orthogonalize& op, const Orthogonalize::Scratch& scratch) {
  run(Cpu(), s, op.normalize(scratch.x_NK), Buffer());
  const int64_t rows = op.x_NK.rows() / op.batch, cols = op.x_NK.cols();
  for (int64_t i = 0; i < op.batch; ++i) {
    const int64_t first = i * rows * cols;
    iterate(scratch.x_NK.tensor().f32() + first, op.x_NK.f32() + first, rows, cols,
            scratch.a.tensor().f32(), scratch.b.tensor().f32());
  }
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
