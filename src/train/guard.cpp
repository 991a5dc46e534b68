#include "train/guard.h"

#include <cmath>
#include <string>

#include "core/error.h"
#include "core/log.h"
#include "core/number_text.h"

namespace sbtrain {

Guard::Guard(int64_t max_in_a_row, GuardState state) : max_in_a_row_(max_in_a_row), state_(state) {
  require(max_in_a_row >= 1, "guard: max_in_a_row is {}", max_in_a_row);
}

bool Guard::accept(int64_t step, double loss, double squared_norm, double lr,
                   const RunningLoss* spike) {
  // Uses isfinite and not a comparison, because NaN makes every comparison false.
  const bool finite = std::isfinite(loss) && std::isfinite(squared_norm);
  state_.spike = finite && spike != nullptr;
  if (finite && !state_.spike) {
    state_.in_a_row = 0;
    last_good_ = {step, loss, lr};
    return true;
  }
  ++(state_.spike ? state_.spikes : state_.skipped);
  ++state_.in_a_row;
  std::string what = fmt::format("loss {}, gradient norm {}", number_text(loss),
                                 number_text(std::sqrt(squared_norm)));
  if (state_.spike) {
    what += fmt::format(" is a spike (running mean {:.4f}, standard deviation {:.4f})", spike->mean,
                        std::sqrt(spike->variance));
  }
  if (state_.in_a_row < max_in_a_row_) {
    log_warning("step {}: {}: skipped ({} of at most {} in a row)", step, what, state_.in_a_row,
                max_in_a_row_);
    return false;
  }
  const std::string before =
      last_good_.step < 0
          ? "this process has applied no step"
          : fmt::format("the last applied step was {} with loss {:.4f} at lr {:.3g}",
                        last_good_.step, last_good_.loss, last_good_.lr);
  fail(ExitCode::kDiverged,
       "step {}: {} at lr {:.3g}, {} bad steps in a row (train.max_bad_steps); {}; {}", step, what,
       lr, state_.in_a_row, before, kAfterDivergence);
}

}  // namespace sbtrain
