// Which work of the streams of one device is known to be done before which: vector clocks.
//
// Each stream counts the events recorded on it. Its clock holds, for every stream, the count up to
// which that stream's work is done before the work that this one is given next. Nothing here waits:
// the streams themselves do (core/stream.h), and Memory asks before it gives memory that one stream
// has used to another.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace sbtrain {

// Indexed by stream. Streams beyond its size have count 0: none of their work is known to be done.
using StreamClock = std::vector<int64_t>;

// All work that a stream was given up to some moment.
struct StreamMark {
  int stream = 0;
  int64_t count = 0;
};

// Whether the mark's work is done before the work of a stream with this clock.
inline bool covers(const StreamClock& clock, const StreamMark& mark) {
  return mark.stream < static_cast<int>(clock.size()) && clock[mark.stream] >= mark.count;
}

class StreamOrder {
 public:
  // The index of the stream of that name; indices count from 0 in the order of first mention.
  int stream(std::string_view name);
  const std::string& name(int stream) const { return streams_.at(stream).name; }
  int streams() const { return static_cast<int>(streams_.size()); }

  // The work that the stream was given until now. Only an event recorded later covers it.
  StreamMark now(int stream) const;
  // The work that is done before the stream's next work, all of its own included.
  const StreamClock& clock(int stream) const { return streams_.at(stream).clock; }

  // Records an event: returns the work that is done once the event is reached.
  StreamClock record(int stream);
  // The stream's later work runs after all work that `event` stands for.
  void wait(int stream, const StreamClock& event);

 private:
  struct Stream {
    std::string name;
    int64_t count = 1;  // of the next event
    StreamClock clock;
  };
  std::vector<Stream> streams_;
};

}  // namespace sbtrain
