#include "ops/optimizer.h"

#include <algorithm>

#include "ops/memory.h"

namespace sbtrain::ops {

double sum(Stream& s, const Tensor& x) {
  const Buffer y_1 = s.scratch("sum", DType::kF64, {1});
  run(s, Fill{.x = y_1, .value = 0});
  run(s, AddSum{.y_1 = y_1, .x = x});
  double value = 0;
  run(s, CopyToHost{.host = &value, .x = y_1});
  return value;
}

void AddSquaredNorms::check() const {
  Check(kName).flat("y_1", y_1, 1, DType::kF64);
  for (const Tensor& each : x) Check(kName).flat("x", each, each.numel(), DType::kF32);
}

Buffer AddSquaredNorms::scratch(const Stream& s) const {
  if (!on_cuda(s)) return {};
  const int64_t count = std::min<int64_t>(static_cast<int64_t>(x.size()), kernels::kMaxNormParts);
  return s.scratch("partial sums", DType::kF64, {std::max<int64_t>(count, 1), kernels::kSumParts});
}

void AdamWs::check() const {
  for (const AdamW& range : ranges) {
    range.check();
    const AdamW& first = ranges.front();
    require(range.stats.data == first.stats.data && range.lr == first.lr &&
                range.beta1 == first.beta1 && range.beta2 == first.beta2 &&
                range.eps == first.eps && range.decay == first.decay,
            "adamw: ranges with different hyperparameters");
  }
}

void AdamW::check() const {
  const Check c(kName);
  const int64_t n = w_N.numel();
  c.flat("w_N", w_N, n, DType::kF32);
  c.flat("m_N", m_N, n, DType::kF32);
  c.flat("v_N", v_N, n, DType::kF32);
  c.flat("grad_N", grad_N, n, DType::kF32);
  if (compute_N.defined()) c.flat("compute_N", compute_N, n);
  c.flat("stats", stats, kStepStats, DType::kF64);
  int64_t end = 0;
  for (const DecayRange& range : decays) {
    require(range.begin >= end && range.end >= range.begin && range.end <= n,
            "adamw: decay range [{}, {}) of {} elements", range.begin, range.end, n);
    end = range.end;
  }
}

}  // namespace sbtrain::ops
