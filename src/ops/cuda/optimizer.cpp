#include "kernels/optimizer.h"

#include "ops/cuda/arguments.h"
#include "ops/cuda/context.h"
#include "ops/cuda/cuda.h"
#include "ops/scratch.h"

namespace sbtrain::ops::cuda {
namespace {

static_assert(int{kLossSum} == kernels::kLossSum && int{kSquaredNorm} == kernels::kSquaredNorm &&
              int{kUpdates} == kernels::kUpdates && int{kApply} == kernels::kApply &&
              int{kGradScale} == kernels::kGradScale && int{kBias1} == kernels::kBias1 &&
              int{kBias2} == kernels::kBias2 && int{kStepStats} == kernels::kStatCount);

kernels::Reduction arguments(const Tensor& y_1, const Tensor& x, const Tensor& scratch) {
  return {.out = y_1.f64(),
          .x = x.f32(),
          .stride = x.row_stride,
          .rows = x.rows(),
          .cols = x.cols(),
          .scratch = scratch.f64()};
}

}  // namespace

void add_sum(Stream& s, Tensor y_1, Tensor x) {
  const Buffer scratch = reduction_partials(s);
  kernels::sum(cuda_stream(s), arguments(y_1, x, scratch));
}

void add_squared_norm(Stream& s, Tensor y_1, Tensor x) {
  const Buffer scratch = reduction_partials(s);
  kernels::squared_norm(cuda_stream(s), arguments(y_1, x, scratch));
}

void finish_step(Stream& s, Tensor stats, double clip, double beta1, double beta2) {
  kernels::finish_step(cuda_stream(s),
                       {.stats = stats.f64(), .beta1 = beta1, .beta2 = beta2, .clip = clip});
}

void adamw(Stream& s, const AdamW& t) {
  require(t.decays.size() <= kernels::kMaxDecaySegments,
          "adamw: {} ranges with weight decay in {}, at most {}", t.decays.size(), t.w_N.describe(),
          kernels::kMaxDecaySegments);
  const bool f32_copy = t.compute_N.defined() && t.compute_N.dtype == DType::kF32;
  kernels::AdamW p{.w = t.w_N.f32(),
                   .m = t.m_N.f32(),
                   .v = t.v_N.f32(),
                   .grad = t.grad_N.f32(),
                   .w_bf16 = f32_copy ? nullptr : bf16_or_null(t.compute_N),
                   .n = t.w_N.numel(),
                   .stats = t.stats.f64(),
                   .lr = t.lr,
                   .beta1 = t.beta1,
                   .beta2 = t.beta2,
                   .eps = t.eps,
                   .segment_count = 0,
                   .segments = {}};
  for (const DecayRange& range : t.decays) {
    p.segments[p.segment_count++] = {range.begin, range.end, t.decay};
  }
  kernels::adamw(cuda_stream(s), p);
  if (f32_copy) copy(s, t.compute_N, t.w_N);
}

}  // namespace sbtrain::ops::cuda
