// Running averages of weights.
#pragma once

#include "kernels/average.h"
#include "ops/optimizer.h"

namespace sbtrain::ops {

// a = decay a + (1 - decay) w on N elements, f32, unless kApply is 0.
struct AverageWeights {
  static constexpr std::string_view kName = "average_weights";
  Tensor a_N;
  Tensor w_N;
  Tensor stats;  // f64 [kStepStats]
  float decay;
  void check() const {
    const Check c(kName);
    c.flat("a_N", a_N, w_N.numel(), DType::kF32);
    c.flat("w_N", w_N, w_N.numel(), DType::kF32);
    c.flat("stats", stats, kStepStats, DType::kF64);
  }
  kernels::AverageWeights kernel() const { return {stats, decay, a_N, w_N, w_N.numel()}; }
};

namespace cpu {
void run(Cpu, Stream& s, const AverageWeights& op);
}  // namespace cpu

}  // namespace sbtrain::ops
