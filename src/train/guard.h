// Decides whether a step's gradients may be applied.
//
// A step whose loss or gradient norm is not finite is skipped: the caller leaves weights and
// moments unchanged and continues with the next step's data. The decision depends only on the
// arguments, so ranks that pass the same all-reduced values skip the same steps.
#pragma once

#include <cstdint>
#include <limits>

namespace sbtrain {

// Counters that a checkpoint keeps, so that a resumed run gives up at the same step.
struct GuardState {
  int64_t skipped = 0;   // in the whole run
  int64_t in_a_row = 0;  // up to the last step
  bool operator==(const GuardState&) const = default;
};

// Counts the steps in a row that had to be skipped, and ends the run when there are too many.
class Guard {
 public:
  using State = GuardState;

  // `max_in_a_row` is train.max_bad_steps, at least 1.
  explicit Guard(int64_t max_in_a_row, GuardState state = {});

  // True when the step may be applied, false when it must be skipped. `step` is the number shown
  // in messages; `loss` and `squared_norm` (of the gradients, before clipping) are those of all
  // ranks together. Throws ExitCode::kDiverged at the max_in_a_row-th bad step in a row.
  bool accept(int64_t step, double loss, double squared_norm, double lr);

  const GuardState& state() const { return state_; }

 private:
  struct GoodStep {
    int64_t step = -1;
    double loss = std::numeric_limits<double>::quiet_NaN();
    double lr = 0.0;
  };

  int64_t max_in_a_row_;
  GuardState state_;
  GoodStep last_good_;
};

}  // namespace sbtrain
