// A point in a stream's work that other streams, and the host, can wait for.
#pragma once

#include <utility>

#include "core/stream_order.h"

struct CUevent_st;

namespace sbtrain {

// After Stream::record() the event stands for all work that the stream was given until then. After
// Stream::wait() a stream starts the work that it is given later only once the event's is done. On
// the CPU an op is done when it returns, so there the event only tells Memory what may be reused.
// An event may be recorded again: a wait is for the last record before it.
class Event {
 public:
  Event() = default;
  Event(Event&& other) noexcept { *this = std::move(other); }
  Event& operator=(Event&& other) noexcept;
  ~Event();

  // Whether the event's work is done; does not wait. True before the first record.
  bool done() const;
  // The host waits until the event's work is done.
  void synchronize() const;

 private:
  friend class Stream;
  CUevent_st* native_ = nullptr;  // on a GPU, from the first record on
  StreamClock clock_;
};

}  // namespace sbtrain
