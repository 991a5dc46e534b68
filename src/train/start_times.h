// What the time from the start of the program to its first step went into.
#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace sbtrain {

class StartTimes {
 public:
  // The time since the process was started is the phase "program".
  StartTimes();

  // The time since the phase before it belongs to `phase`; phases of one name are added.
  void done(std::string_view phase);

  // Logs "first step after 3.9 s (program 0.4, plan 0.2, weights 0.1, ...)", at the first call
  // only. Every phase appears at debug level, in the log line those that it would not round to
  // zero.
  void first_step();

 private:
  using Clock = std::chrono::steady_clock;
  std::vector<std::pair<std::string, double>> phases_;  // seconds
  Clock::time_point last_;
  bool logged_ = false;
};

}  // namespace sbtrain
