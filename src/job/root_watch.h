// Rank 0, seen from ranks of the same machine that wait for it to listen.
#pragma once

#include <sys/types.h>

#include <chrono>

#include "job/launch.h"

namespace sbtrain::control {

// Looks for the process of rank 0 among those of this machine, by the variables that the launcher
// has given it. Where that cannot be told, as in containers of their own, rank 0 never seems to
// have ended.
class RootWatch {
 public:
  explicit RootWatch(const Launch& launch);
  // Whether rank 0 has ended: it was there, or must have been, and is there no more. Cheap enough
  // for every turn of a loop, since it looks once a second.
  bool ended();

 private:
  using Clock = std::chrono::steady_clock;
  bool is_rank_zero(pid_t pid) const;
  bool look();

  const Launch launch_;
  const bool can_see_;     // processes that the launcher has started beside this one
  const bool starts_all_;  // the launcher starts the ranks of a machine at the same time
  const Clock::time_point begin_ = Clock::now();
  Clock::time_point next_ = begin_;
  bool seen_ = false;
  int missed_ = 0;  // looks in a row
};

}  // namespace sbtrain::control
