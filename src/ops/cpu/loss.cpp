#include "ops/loss.h"

#include <cmath>
#include <limits>

#include "core/error.h"
#include "ops/cpu/blas.h"
#include "ops/cpu/parallel.h"
#include "ops/cpu/simd.h"

namespace sbtrain::ops::cpu {
namespace {

// z = exp(z - max); returns the sum.
float exponentiate_block(float* z, int64_t n, float max) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) {
    const float e = simd::exp(z[i] - max);
    z[i] = e;
    sum += e;
  }
  return sum;
}

// Turns one row of logits into exp(logit - max) and returns their log-sum-exp and 1 / sum.
struct Softmax {
  double lse;
  float inverse_sum;
};
Softmax exponentiate(float* z, int64_t vocab) {
  float max = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : max)
  for (int64_t i = 0; i < vocab; ++i) max = z[i] > max ? z[i] : max;
  double sum = 0;
  constexpr int64_t kBlock = 1024;  // few enough terms to be summed in fp32
  for (int64_t begin = 0; begin < vocab; begin += kBlock) {
    sum += static_cast<double>(exponentiate_block(z + begin, std::min(kBlock, vocab - begin), max));
  }
  return {static_cast<double>(max) + std::log(sum), static_cast<float>(1.0 / sum)};
}

// Whether the target's logit is larger than all others.
bool is_largest(const float* z, int64_t vocab, int32_t target) {
  if (target < 0) return false;
  int64_t smaller = 0;
#pragma omp simd reduction(+ : smaller)
  for (int64_t i = 0; i < vocab; ++i) smaller += z[i] < z[target] ? 1 : 0;
  return smaller == vocab - 1;
}

// Returns the loss of one token and turns its logits into the gradient of the objective:
// dz = weight ((1 + 2 z_loss lse) softmax(z) - onehot(target)).
float token_loss(const CrossEntropy& t, float* z, int64_t vocab, int32_t target) {
  if (target < 0) {
    std::fill(z, z + vocab, 0.0f);
    return 0.0f;
  }
  const float target_logit = z[target];
  const Softmax softmax = exponentiate(z, vocab);
  if (t.dx_TD.defined()) {
    const double slope = 1.0 + 2.0 * static_cast<double>(t.z_loss) * softmax.lse;
    const float factor = static_cast<float>(slope * t.loss_weight) * softmax.inverse_sum;
#pragma omp simd
    for (int64_t i = 0; i < vocab; ++i) z[i] *= factor;
    z[target] -= t.loss_weight;
  }
  return static_cast<float>(softmax.lse - static_cast<double>(target_logit));
}

}  // namespace

void run(Cpu, Stream& s, const CrossEntropy& t, const CrossEntropy::Scratch& scratch) {
  const int64_t tokens = t.x_TD.rows();
  const int64_t width = t.x_TD.cols();
  const int64_t vocab = t.w_VD.rows();
  const int32_t* targets = t.targets_T.i32();
  for (int64_t i = 0; i < tokens; ++i) {
    require(targets[i] < vocab, "linear_cross_entropy: target {} at {} is outside [0, {})",
            targets[i], i, vocab);
  }
  float* z = scratch.logits.tensor().f32();
  float* loss = t.loss_T.f32();
  float* hits = t.hits_T.defined() ? t.hits_T.f32() : nullptr;
  const float* w = t.w_VD.f32();
  const int64_t chunk = logits_chunk_tokens(s, tokens, vocab);
  for (int64_t begin = 0; begin < tokens; begin += chunk) {
    const int64_t count = std::min(chunk, tokens - begin);
    const float* x = t.x_TD.f32() + begin * t.x_TD.row_stride;
    gemm(Transpose::kNo, Transpose::kYes, count, vocab, width, t.logit_scale, x, t.x_TD.row_stride,
         w, t.w_VD.row_stride, 0.0f, z, vocab);
    parallel_rows(count, 4 * vocab, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        if (hits) hits[begin + i] = is_largest(z + i * vocab, vocab, targets[begin + i]) ? 1 : 0;
        loss[begin + i] = token_loss(t, z + i * vocab, vocab, targets[begin + i]);
      }
    });
    if (!t.dx_TD.defined()) continue;
    gemm(Transpose::kNo, Transpose::kNo, count, width, vocab, t.logit_scale, z, vocab, w,
         t.w_VD.row_stride, 0.0f, t.dx_TD.f32() + begin * t.dx_TD.row_stride, t.dx_TD.row_stride);
    gemm(Transpose::kYes, Transpose::kNo, vocab, width, count, t.logit_scale, z, vocab, x,
         t.x_TD.row_stride, t.accumulate_dw || begin > 0 ? 1.0f : 0.0f, t.dw_VD.f32(),
         t.dw_VD.row_stride);
  }
}

}  // namespace sbtrain::ops::cpu
