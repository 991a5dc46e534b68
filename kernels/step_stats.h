// The numbers of an optimizer step, f64 on the device, so that no step waits for the host.
#pragma once

#include <cstdint>

namespace sbtrain::kernels {

enum StepStat : uint8_t {
  // A rank's contributions, which one reduction turns into the sums of all ranks.
  kLossSum,       // nats, of the valid targets
  kSquaredNorm,   // of the gradients of that sum, before clipping
  kValidTargets,  // what the sums are divided by
  kStopRequests,  // ranks that were asked to save and stop
  kSaveRequests,  // ranks that were asked to save
  // What FinishStep makes of them, alike on every rank.
  kUpdates,    // applied so far
  kApply,      // 1: loss and norm are finite; 0: the step is skipped
  kGradScale,  // of the mean over the valid targets, and clipping
  kBias1,      // 1 - beta1^updates
  kBias2,      // 1 - beta2^updates
  kStepStats,  // number of them
  kSummedStats = kUpdates,
};

}  // namespace sbtrain::kernels
