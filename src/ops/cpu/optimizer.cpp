#include "ops/optimizer.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/cpu/parallel.h"
#include "ops/memory.h"

namespace sbtrain::ops::cpu {
namespace {

// Sums of fixed chunks, added in order: the same for every number of threads.
template <typename ChunkSum>
double sum_chunks(const Tensor& x, ChunkSum&& chunk_sum) {
  constexpr int64_t kChunk = int64_t{1} << 14;
  const int64_t runs = x.contiguous() ? 1 : x.rows();
  const int64_t run = x.contiguous() ? x.numel() : x.cols();
  const int64_t chunks_per_run = (run + kChunk - 1) / kChunk;
  const float* data = x.f32();
  std::vector<double> sums(static_cast<size_t>(runs * chunks_per_run));
  parallel_rows(runs * chunks_per_run, std::min(run, kChunk), [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t begin = i % chunks_per_run * kChunk;
      const float* chunk = data + i / chunks_per_run * x.row_stride + begin;
      sums[static_cast<size_t>(i)] = chunk_sum(chunk, std::min(kChunk, run - begin));
    }
  });
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

}  // namespace

void run(Cpu, Stream& /*s*/, const AddSquaredNorm& op, const Buffer& /*scratch*/) {
  *op.y_1.f64() += sum_chunks(op.x, [](const float* chunk, int64_t n) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(chunk[i]) * chunk[i];
    return sum;
  });
}

void run(Cpu, Stream& s, const AddSquaredNorms& op, const Buffer& scratch) {
  for (const Tensor& x : op.x) run(Cpu(), s, AddSquaredNorm{.y_1 = op.y_1, .x = x}, scratch);
}

void run(Cpu, Stream& /*s*/, const AddSum& op, const Buffer& /*scratch*/) {
  *op.y_1.f64() += sum_chunks(op.x, [](const float* chunk, int64_t n) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) sum += chunk[i];
    return sum;
  });
}

void run(Cpu, Stream& /*s*/, const FinishStep& op) {
  double* x = op.stats.f64();
  const double targets = std::max(x[kValidTargets], 1.0);
  const double loss = x[kLossSum] / targets;
  const double norm = std::sqrt(x[kSquaredNorm]) / targets;
  const bool finite = std::isfinite(loss) && std::isfinite(norm);
  const bool warm = op.spike_sigma > 0 && x[kLossCount] >= op.spike_window;
  const double bound = x[kLossMean] + op.spike_sigma * std::sqrt(x[kLossVariance]);
  const bool spike = finite && warm && loss > bound;
  const bool apply = finite && !spike;
  x[kApply] = apply ? 1 : 0;
  x[kSpike] = spike ? 1 : 0;
  x[kUpdates] += x[kApply];
  if (apply && x[kValidTargets] > 0) {
    x[kLossCount] += 1;
    const double share = 1 / std::min(x[kLossCount], op.spike_window);
    const double distance = loss - x[kLossMean];
    x[kLossMean] += share * distance;
    x[kLossVariance] = (1 - share) * (x[kLossVariance] + share * distance * distance);
  }
  x[kGradScale] = (op.clip > 0 && norm > op.clip ? op.clip / norm : 1) / targets;
  x[kBias1] = 1 - std::pow(op.beta1, x[kUpdates]);
  x[kBias2] = 1 - std::pow(op.beta2, x[kUpdates]);
}

namespace {

// Updates elements [begin, end), which have one weight decay.
void adamw_range(const AdamW& t, int64_t begin, int64_t end, float decay) {
  float* w = t.w_N.f32();
  float* m = t.m_N.f32();
  float* v = t.v_N.f32();
  const float* grad = t.grad_N.f32();
  const double* stats = t.stats.f64();
  const auto scale = static_cast<float>(stats[kGradScale]);
  const auto m_correction = static_cast<float>(1.0 / stats[kBias1]);
  const auto v_correction = static_cast<float>(1.0 / stats[kBias2]);
  const AdamW p = t;  // a copy whose scalars no store can change
  constexpr int64_t kRun = 1024;
  parallel_rows((end - begin + kRun - 1) / kRun, kRun, [&, p](int64_t first, int64_t last) {
    const int64_t stop = std::min(end, begin + last * kRun);
#pragma omp simd
    for (int64_t i = begin + first * kRun; i < stop; ++i) {
      const float g = scale * grad[i];
      m[i] = p.beta1 * m[i] + (1.0f - p.beta1) * g;
      v[i] = p.beta2 * v[i] + (1.0f - p.beta2) * (g * g);
      const float step = m[i] * m_correction / (std::sqrt(v[i] * v_correction) + p.eps);
      w[i] -= p.lr * (step + decay * w[i]);
    }
  });
}

}  // namespace

void run(Cpu, Stream& s, const AdamW& t) {
  if (t.stats.f64()[kApply] == 0) return;
  int64_t begin = 0;
  for (const DecayRange& range : t.decays) {
    adamw_range(t, begin, range.begin, 0.0f);
    adamw_range(t, range.begin, range.end, t.decay);
    begin = range.end;
  }
  adamw_range(t, begin, t.w_N.numel(), 0.0f);
  if (t.compute_N.defined()) run(Cpu(), s, Copy{.y = t.compute_N, .x = t.w_N});
}

void run(Cpu, Stream& s, const AdamWs& op) {
  for (const AdamW& range : op.ranges) run(Cpu(), s, range);
}

}  // namespace sbtrain::ops::cpu
