#include "ops/optimizer.h"

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

void AdamW::check() const {
  const Check c(kName);
  const int64_t n = w_N.numel();
  c.flat("w_N", w_N, n);
  c.flat("m_N", m_N, n);
  c.flat("v_N", v_N, n);
  c.flat("grad_N", grad_N, n);
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
