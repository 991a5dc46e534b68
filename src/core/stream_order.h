// Which work of the streams of one device is known to be done before which: vector clocks.
//
// Each stream counts the events recorded on it. Its clock says, for every stream, up to which of
// these counts that stream's work is done before whatever this one is given next. Nothing here
// waits: the streams themselves do (core/stream.h), and Memory asks before it hands memory that one
// stream has used to another.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace sbtrain {

// By stream; streams beyond its size count 0: none of their work is known to be done.
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
  // The index of the stream of that name, from 0 in the order of their first mention.
  int stream(std::string_view name);
  const std::string& name(int stream) const { return streams_.at(stream).name; }
  int streams() const { return static_cast<int>(streams_.size()); }

  // What the stream was given until now. Only an event recorded later covers it.
  StreamMark now(int stream) const;
  // What is done before the stream's next work, all of its own included.
  const StreamClock& clock(int stream) const { return streams_.at(stream).clock; }

  // Records an event: returns what is done once it is reached.
  StreamClock record(int stream);
  // The stream's later work runs after all that `event` stands for.
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
