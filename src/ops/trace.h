// When the ops of several streams of a GPU ran, by one clock: what ran beside what.
#pragma once

#include <string>
#include <vector>

#include "core/stream.h"

namespace sbtrain::ops {

struct TracedOp {
  std::string name;    // as the stream's profile has it
  double begin = 0;    // seconds since trace(), on the device
  double seconds = 0;  // waits within the op included, such as that of a collective for other ranks
};

struct Traced {
  Stream* stream;
  std::vector<TracedOp>* ops;
};

// Traces the ops that each stream is given from now on: its next Synchronize adds them to the list
// beside it, in their order, and ends the trace of that stream. The streams must have profiles
// (Stream::set_profile). Throws ExitCode::kInternal for a stream that is not on a GPU: elsewhere
// nothing runs beside anything.
void trace(const std::vector<Traced>& streams);

namespace cuda {
void trace(const std::vector<Traced>& streams);
}  // namespace cuda

}  // namespace sbtrain::ops
