// How long a stream stands still because what it waits for has not come yet.
#pragma once

#include <cstddef>
#include <deque>
#include <string_view>
#include <vector>

#include "core/stream.h"

struct CUevent_st;

namespace sbtrain {

// Times the waits of one stream on a GPU, between marks on the stream itself, so that measuring
// costs neither the host nor the device time worth mentioning. Elsewhere, where ops are done when
// they return, every time is zero.
class WaitTimes {
 public:
  explicit WaitTimes(Stream& s) : stream_(s) {}
  ~WaitTimes();
  WaitTimes(const WaitTimes&) = delete;
  WaitTimes& operator=(const WaitTimes&) = delete;

  // stream.wait(event), timed, as `name` in a profile of the stream (ops::await).
  void wait(const Event& event, std::string_view name = "await");

  // The waits since the last call form a batch, that of a step.
  void end_batch();
  // The waits since then count for nothing, as those of a validation.
  void drop();
  // Seconds of all waits of the oldest batch that was not taken yet, which must be done on the
  // device. 0 without a batch.
  double take_batch();

 private:
  struct Mark {
    CUevent_st* begin = nullptr;
    CUevent_st* end = nullptr;
  };
  Mark spare();

  Stream& stream_;
  std::vector<Mark> spare_;
  std::vector<Mark> current_;
  std::deque<std::vector<Mark>> batches_;
};

}  // namespace sbtrain
