#include <cmath>
#include <vector>

#include "ops/cpu/cpu.h"
#include "ops/cpu/parallel.h"

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

double squared_norm(Stream& /*s*/, Tensor x) {
  return sum_chunks(x, [](const float* chunk, int64_t n) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(chunk[i]) * chunk[i];
    return sum;
  });
}

double sum(Stream& /*s*/, Tensor x) {
  return sum_chunks(x, [](const float* chunk, int64_t n) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) sum += chunk[i];
    return sum;
  });
}

void adamw(Stream& /*s*/, const AdamW& t) {
  float* w = t.w_N.f32();
  float* m = t.m_N.f32();
  float* v = t.v_N.f32();
  const float* grad = t.grad_N.f32();
  const auto steps = static_cast<double>(t.step);
  const auto m_correction =
      static_cast<float>(1.0 / (1.0 - std::pow(static_cast<double>(t.beta1), steps)));
  const auto v_correction =
      static_cast<float>(1.0 / (1.0 - std::pow(static_cast<double>(t.beta2), steps)));
  const AdamW p = t;  // a copy whose scalars no store can change
  const int64_t n = t.w_N.numel();
  constexpr int64_t kRun = 1024;
  parallel_rows((n + kRun - 1) / kRun, kRun, [&, p](int64_t first, int64_t last) {
    const int64_t end = std::min(n, last * kRun);
#pragma omp simd
    for (int64_t i = first * kRun; i < end; ++i) {
      const float g = p.grad_scale * grad[i];
      m[i] = p.beta1 * m[i] + (1.0f - p.beta1) * g;
      v[i] = p.beta2 * v[i] + (1.0f - p.beta2) * (g * g);
      const float step = m[i] * m_correction / (std::sqrt(v[i] * v_correction) + p.eps);
      w[i] -= p.lr * (step + p.decay * w[i]);
    }
  });
}

}  // namespace sbtrain::ops::cpu
