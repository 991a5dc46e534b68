#include "ops/optimizer.h"

#include "kernels/optimizer.h"
#include "ops/cuda/arguments.h"
#include "ops/cuda/context.h"
#include "ops/memory.h"

namespace sbtrain::ops::cuda {
namespace {

kernels::Reduction arguments(const Tensor& y_1, const Tensor& x, const Tensor& scratch) {
  return {
      .out = arg(y_1), .x = arg(x), .rows = x.rows(), .cols = x.cols(), .scratch = arg(scratch)};
}

// Updates elements [begin, end), which contain the ranges with decay.
void update(Stream& s, const AdamW& op, int64_t begin, int64_t end,
            std::span<const DecayRange> decays) {
  const auto from = [&](const Tensor& t) { return t.f32() + begin; };
  const bool copies = op.compute_N.defined() && op.compute_N.dtype == DType::kBF16;
  __nv_bfloat16* const compute = arg(copies ? op.compute_N : Tensor());
  kernels::AdamW p{.w = from(op.w_N),
                   .m = from(op.m_N),
                   .v = from(op.v_N),
                   .grad = from(op.grad_N),
                   .w_bf16 = copies ? compute + begin : nullptr,
                   .n = end - begin,
                   .stats = arg(op.stats),
                   .lr = op.lr,
                   .beta1 = op.beta1,
                   .beta2 = op.beta2,
                   .eps = op.eps,
                   .segment_count = 0,
                   .segments = {}};
  for (const DecayRange& range : decays) {
    p.segments[p.segment_count++] = {range.begin - begin, range.end - begin, op.decay};
  }
  kernels::adamw(cuda_stream(s), p);
}

}  // namespace

void run(Cuda, Stream& s, const AddSum& op, const Buffer& scratch) {
  kernels::sum(cuda_stream(s), arguments(op.y_1, op.x, scratch));
}

void run(Cuda, Stream& s, const AddSquaredNorm& op, const Buffer& scratch) {
  kernels::squared_norm(cuda_stream(s), arguments(op.y_1, op.x, scratch));
}

void run(Cuda, Stream& s, const FinishStep& op) {
  kernels::finish_step(cuda_stream(s), {.stats = arg(op.stats),
                                        .beta1 = op.beta1,
                                        .beta2 = op.beta2,
                                        .clip = op.clip,
                                        .spike_sigma = op.spike_sigma,
                                        .spike_window = op.spike_window});
}

// A launch takes a limited number of ranges with decay, and ends where the last of them ends.
void run(Cuda, Stream& s, const AdamW& op) {
  std::span<const DecayRange> left = op.decays;
  int64_t begin = 0;
  while (left.size() > kernels::kMaxDecaySegments) {
    const auto some = left.first(kernels::kMaxDecaySegments);
    update(s, op, begin, some.back().end, some);
    begin = some.back().end;
    left = left.subspan(some.size());
  }
  update(s, op, begin, op.w_N.numel(), left);
  if (op.compute_N.defined() && op.compute_N.dtype == DType::kF32) {
    run(Cuda(), s, Copy{.y = op.compute_N, .x = op.w_N});
  }
}

}  // namespace sbtrain::ops::cuda
