#include "core/stream_order.h"

#include <algorithm>
#include <limits>

#include "core/error.h"

namespace sbtrain {

int StreamOrder::stream(std::string_view name) {
  const auto found = std::find_if(streams_.begin(), streams_.end(),
                                  [&](const Stream& stream) { return stream.name == name; });
  if (found != streams_.end()) return static_cast<int>(found - streams_.begin());
  const size_t index = streams_.size();
  Stream stream{.name = std::string(name), .clock = StreamClock(index + 1, 0)};
  stream.clock[index] = std::numeric_limits<int64_t>::max();  // its own work is always in order
  streams_.push_back(std::move(stream));
  return static_cast<int>(index);
}

StreamMark StreamOrder::now(int stream) const {
  return {stream, streams_.at(stream).count};
}

StreamClock StreamOrder::record(int stream) {
  Stream& s = streams_.at(stream);
  StreamClock event = s.clock;
  event[stream] = s.count++;
  return event;
}

void StreamOrder::wait(int stream, const StreamClock& event) {
  StreamClock& clock = streams_.at(stream).clock;
  if (clock.size() < event.size()) clock.resize(event.size(), 0);
  for (size_t i = 0; i < event.size(); ++i) clock[i] = std::max(clock[i], event[i]);
}

}  // namespace sbtrain
