// Decides whether a step's gradients may be applied.
//
// A step whose loss or gradient norm is not finite, or whose loss is a spike, is skipped: weights
// and moments stay unchanged, and the run continues with the next step's data. The device takes
// this decision (ops::FinishStep); the guard repeats and counts it. It depends only on all-reduced
// values, so all ranks skip the same steps.
#pragma once

#include <cstdint>
#include <limits>

namespace sbtrain {

// Counters that a checkpoint keeps, so that a resumed run gives up at the same step.
struct GuardState {
  int64_t skipped = 0;   // in the whole run, because they were not finite
  int64_t in_a_row = 0;  // up to the last step, of both kinds
  int64_t spikes = 0;    // in the whole run, skipped as spikes
  bool spike = false;    // the last step was one
  // The last step was skipped because it was not finite.
  bool not_finite() const { return in_a_row > 0 && !spike; }
  bool operator==(const GuardState&) const = default;
};

// The running loss of applied steps, which spikes are told by: see ops::FinishStep. A checkpoint
// keeps it, so that a resumed run decides alike.
struct RunningLoss {
  int64_t count = 0;
  double mean = 0;      // nats per target
  double variance = 0;  // of that
  bool operator==(const RunningLoss&) const = default;
};

// What a run that has diverged can be advised to do.
inline constexpr const char* kAfterDivergence =
    "try a lower train.lr, a longer schedule.warmup or a smaller train.clip. The same command "
    "continues from the newest checkpoint; if that one is bad already, go back by "
    "--checkpoint.resume=last-good, or to a step by --checkpoint.resume=STEP";

// Counts the steps in a row that had to be skipped, and ends the run when there are too many.
class Guard {
 public:
  using State = GuardState;

  // `max_in_a_row` is train.max_bad_steps, at least 1.
  explicit Guard(int64_t max_in_a_row, GuardState state = {});

  // True when the step may be applied, false when it must be skipped. `step` is the number shown
  // in messages; `loss` and `squared_norm` (of the gradients, before clipping) are those of all
  // ranks together; `spike` is the running loss if the step's is a spike against it, else null.
  // Throws ExitCode::kDiverged at the max_in_a_row-th bad step in a row.
  bool accept(int64_t step, double loss, double squared_norm, double lr,
              const RunningLoss* spike = nullptr);

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
