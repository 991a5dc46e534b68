// Time by op, for `sbtrain bench`. Attached to a Stream; without one, ops are not timed.
#pragma once

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

}  // namespace sbtrain
