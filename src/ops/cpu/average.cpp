#include "ops/average.h"

#include <algorithm>

#include "ops/cpu/parallel.h"

namespace sbtrain::ops::cpu {

void run(Cpu, Stream& /*s*/, const AverageWeights& op) {
  if (op.stats.f64()[kApply] == 0) return;
  float* a = op.a_N.f32();
  const float* w = op.w_N.f32();
  const int64_t n = op.w_N.numel();
  const float decay = op.decay;
  constexpr int64_t kRun = 1024;
  parallel_rows((n + kRun - 1) / kRun, kRun, [=](int64_t first, int64_t last) {
    const int64_t stop = std::min(n, last * kRun);
#pragma omp simd
    for (int64_t i = first * kRun; i < stop; ++i) a[i] = decay * a[i] + (1.0f - decay) * w[i];
  });
}

}  // namespace sbtrain::ops::cpu
