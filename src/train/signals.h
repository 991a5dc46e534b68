// Signals that ask a run to save, or to save and stop.
//
//   SIGTERM, SIGUSR1  finish the current step (of several ranks, perhaps the next one as well),
//   save,
//                     exit 85 (a scheduler's warning)
//   SIGINT            the same; a second one ends the process at once, without saving
//   SIGUSR2           save after the current step and continue
//
// Repeated SIGTERM and SIGUSR1 have no effect, so a save that has begun is completed.
#pragma once

#include <array>
#include <csignal>

#include "core/backend.h"

namespace sbtrain {

// From hold_stop_signals() on, the signals above stay pending, until a StopSignals object takes
// them or release_stop_signals() gives them their ordinary effect. The mask outlives an exec, so a
// signal that arrives while the program starts is not lost.
void hold_stop_signals();
void release_stop_signals();

// Installs the handlers, takes the signals that were held, and puts the earlier ones back when
// destroyed. The handlers only set flags, so they may interrupt anything; system calls of other
// code are restarted. The flags belong to the process, so there is at most one object at a time (a
// second throws ExitCode::kInternal). Ranks of one run may be signalled at different steps, so they
// must agree on the flags first.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // Stays true once a stop has been asked for.
  bool stop_requested() const { return signal() != 0; }
  // The signal that first asked for a stop, or 0.
  int signal() const;
  // True once for each SIGUSR2 (several between two calls count as one).
  bool save_requested();
  // Two numbers that the handlers keep up to date, 1 or 0: whether stop_requested(), and whether
  // the next save_requested() will be true. A device of `backend` may read them at any time; they
  // stay until the process ends.
  static const double* flags(Backend backend);

 private:
  static constexpr int kHandled = 4;
  std::array<struct sigaction, kHandled> previous_{};
};

// The signals of a process that trains, from the first call until the process ends: one that
// arrives while a run begins or ends must not kill it either.
StopSignals& training_signals();

}  // namespace sbtrain
