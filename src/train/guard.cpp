#include "train/guard.h"

#include <spdlog/spdlog.h>

#include <cmath>
#include <string>

#include "core/error.h"

namespace sbtrain {

Guard::Guard(int64_t max_in_a_row, GuardState state) : max_in_a_row_(max_in_a_row), state_(state) {
  require(max_in_a_row >= 1, "guard: max_in_a_row is {}", max_in_a_row);
}

bool Guard::accept(int64_t step, double loss, double squared_norm, double lr) {
  // Uses isfinite and not a comparison, because NaN makes every comparison false.
  if (std::isfinite(loss) && std::isfinite(squared_norm)) {
    state_.in_a_row = 0;
    last_good_ = {step, loss, lr};
    return true;
  }
  ++state_.skipped;
  ++state_.in_a_row;
  const double norm = std::sqrt(squared_norm);
  if (state_.in_a_row < max_in_a_row_) {
    spdlog::warn("step {}: loss {}, gradient norm {}: skipped ({} of at most {} in a row)", step,
                 loss, norm, state_.in_a_row, max_in_a_row_);
    return false;
  }
  const std::string before =
      last_good_.step < 0 ? "no step of this process was finite"
                          : fmt::format("the last finite step was {} with loss {:.4f} at lr {:.3g}",
                                        last_good_.step, last_good_.loss, last_good_.lr);
  fail(ExitCode::kDiverged,
       "step {}: loss {}, gradient norm {} at lr {:.3g}, {} bad steps in a row "
       "(train.max_bad_steps); {}. Try a lower train.lr, a longer schedule.warmup or a smaller "
       "train.clip, and resume from a checkpoint before the trouble: --checkpoint.resume=PATH",
       step, loss, norm, lr, state_.in_a_row, before);
}

}  // namespace sbtrain
