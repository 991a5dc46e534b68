// Time by op, for `sbtrain bench`. Attached to a Stream; without one, ops are not timed.
#pragma once

#include <chrono>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace sbtrain {

class OpProfile {
 public:
  struct Entry {
    double seconds = 0;         // of all calls
    std::vector<double> calls;  // of each call, in their order
  };
  void add(std::string_view op, double seconds) {
    auto it = entries_.find(op);
    if (it == entries_.end()) it = entries_.emplace(std::string(op), Entry{}).first;
    it->second.seconds += seconds;
    it->second.calls.push_back(seconds);
  }
  const std::map<std::string, Entry, std::less<>>& entries() const { return entries_; }

 private:
  std::map<std::string, Entry, std::less<>> entries_;
};

// Adds the scope's wall time to `op`; does nothing without a profile.
class OpTimer {
 public:
  OpTimer(OpProfile* profile, std::string_view op) : profile_(profile), op_(op) {
    if (profile_) start_ = Clock::now();
  }
  ~OpTimer() {
    if (profile_) profile_->add(op_, std::chrono::duration<double>(Clock::now() - start_).count());
  }
  OpTimer(const OpTimer&) = delete;
  OpTimer& operator=(const OpTimer&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  OpProfile* profile_;
  std::string_view op_;
  Clock::time_point start_;
};

}  // namespace sbtrain
