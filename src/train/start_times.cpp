#include "train/start_times.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "core/log.h"

namespace sbtrain {
namespace {

// Seconds since the process was started, to the system's clock tick; 0 where /proc does not say.
double process_age() {
  std::ifstream stat("/proc/self/stat");
  std::string text((std::istreambuf_iterator<char>(stat)), std::istreambuf_iterator<char>());
  const size_t name_end = text.rfind(')');  // the program's name may hold anything
  if (name_end == std::string::npos) return 0;
  std::istringstream fields(text.substr(name_end + 1));
  std::string field;
  for (int i = 3; i <= 22 && fields >> field; ++i) {  // proc(5): field 22 is starttime
  }
  double uptime = 0;
  double started = 0;
  std::ifstream("/proc/uptime") >> uptime;
  std::istringstream(field) >> started;
  const auto ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
  return std::max(0.0, uptime - started / ticks);
}

}  // namespace

StartTimes::StartTimes() : phases_{{"program", process_age()}}, last_(Clock::now()) {}

void StartTimes::done(std::string_view phase) {
  if (logged_) return;
  const Clock::time_point now = Clock::now();
  const double seconds = std::chrono::duration<double>(now - last_).count();
  last_ = now;
  const auto known = std::find_if(phases_.begin(), phases_.end(),
                                  [&](const auto& entry) { return entry.first == phase; });
  if (known == phases_.end()) {
    phases_.emplace_back(phase, seconds);
  } else {
    known->second += seconds;
  }
}

void StartTimes::first_step() {
  if (logged_) return;
  done("first step");
  logged_ = true;
  double total = 0;
  std::string shown;
  for (const auto& [phase, seconds] : phases_) {
    total += seconds;
    log_debug("start: {} {:.3f} s", phase, seconds);
    if (seconds < 0.05) continue;
    shown += fmt::format("{}{} {:.1f}", shown.empty() ? "" : ", ", phase, seconds);
  }
  log_info("first step after {:.1f} s{}", total, shown.empty() ? "" : " (" + shown + ")");
}

}  // namespace sbtrain
