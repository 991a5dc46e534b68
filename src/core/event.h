// A point in a stream's work that other streams, and the host, can wait for.
#pragma once

#include <utility>

#include "core/stream_order.h"

struct CUevent_st;

namespace sbtrain {

// Stream::record() sets it to all that the stream was given until then; Stream::wait() holds back
// what another stream is given from then on. On the CPU ops are done when they return, so that it
// only tells Memory what may be used again. An event may be recorded again: a wait is for the last
// record before it.
class Event {
 public:
  Event() = default;
  Event(Event&& other) noexcept { *this = std::move(other); }
  Event& operator=(Event&& other) noexcept;
  ~Event();

  // Whether that work is done; does not wait. True before the first record.
  bool done() const;
  // The host waits until it is.
  void synchronize() const;

 private:
  friend class Stream;
  CUevent_st* native_ = nullptr;  // on a GPU, from the first record on
  StreamClock clock_;
};

}  // namespace sbtrain
