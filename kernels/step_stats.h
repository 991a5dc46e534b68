// The numbers of an optimizer step, f64 on the device, so that no step waits for the host.
#pragma once

#include <cstdint>

namespace sbtrain::kernels {

enum StepStat : uint8_t {
  kLossSum,      // nats, of the valid targets
  kSquaredNorm,  // of the gradients, before clipping
  kUpdates,      // applied so far
  kApply,        // 1: loss and norm are finite; 0: the step is skipped
  kGradScale,    // clipping
  kBias1,        // 1 - beta1^updates
  kBias2,        // 1 - beta2^updates
  kStepStats     // number of them
};

}  // namespace sbtrain::kernels
