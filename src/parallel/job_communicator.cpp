#include "parallel/job_communicator.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>

#include "core/error.h"

namespace sbtrain {

JobCommunicator::JobCommunicator(Control& control, std::vector<int> members, std::string topic)
    : control_(control), members_(std::move(members)), topic_(std::move(topic)) {
  const auto me = std::find(members_.begin(), members_.end(), control_.rank());
  require(me != members_.end(), "rank {} is not a member of its group '{}'", control_.rank(),
          topic_);
  rank_ = static_cast<int>(me - members_.begin());
}

// The call travels before the value, so that ranks which disagree about it notice.
std::vector<std::string> JobCommunicator::exchange(std::string_view call, std::string value) {
  std::vector<std::string> all =
      control_.exchange(topic_, members_, fmt::format("{}\n{}", call, value));
  const auto call_of = [](const std::string& text) { return text.substr(0, text.find('\n')); };
  for (size_t r = 0; r < all.size(); ++r) {
    if (call_of(all[r]) == call) continue;
    fail(ExitCode::kInternal, "rank {} calls '{}', but rank {} calls '{}'", control_.rank(), call,
         members_[r], call_of(all[r]));
  }
  for (std::string& text : all) text.erase(0, call.size() + 1);
  return all;
}

void JobCommunicator::sum(std::span<double> values) {
  std::string text;
  for (const double value : values) text += fmt::format("{:a} ", value);  // exact
  const std::vector<std::string> all =
      exchange(fmt::format("sum of {} values", values.size()), std::move(text));
  std::fill(values.begin(), values.end(), 0.0);
  for (const std::string& terms : all) {
    const char* at = terms.c_str();
    for (double& value : values) {
      char* end = nullptr;
      value += std::strtod(at, &end);
      at = end;
    }
  }
}

std::string JobCommunicator::broadcast(std::string value, int root) {
  require(root >= 0 && root < world(), "broadcast: no rank {} among {}", root, world());
  if (root != rank_) value.clear();
  return exchange(fmt::format("broadcast of a text by rank {}", root), std::move(value)).at(root);
}

std::vector<std::string> JobCommunicator::all_gather(std::string value) {
  return exchange("all_gather of texts", std::move(value));
}

void JobCommunicator::barrier() {
  exchange("barrier", "");
}

std::unique_ptr<Communicator> JobCommunicator::split(const ColorOf& color_of) {
  const int mine = color_of(rank_);
  std::vector<int> places;
  for (int r = 0; r < world(); ++r) {
    if (color_of(r) == mine) places.push_back(r);
  }
  std::vector<int> members;
  for (const int place : places) members.push_back(members_[place]);
  const int color = places.front();
  return make_group(color, std::move(members), fmt::format("{}/{}.{}", topic_, splits_++, color));
}

}  // namespace sbtrain
