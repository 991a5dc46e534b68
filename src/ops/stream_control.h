// What a program asks of a stream beside ops: checks after waits, times, choices made by timing.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/stream.h"
#include "core/tensor.h"

namespace sbtrain::ops {

// A small tensor on its way to the host. The stream continues meanwhile; the host waits only when
// it calls wait().
class HostRead {
 public:
  virtual ~HostRead() = default;
  virtual std::span<const double> wait() = 0;
  virtual bool ready() const = 0;  // wait() would return at once
};

struct TracedOp {
  std::string name;    // as the stream's profile has it
  double begin = 0;    // seconds since trace(), on the device
  double seconds = 0;  // waits within the op included, such as that of a collective for other ranks
};
struct Traced {
  Stream* stream;
  std::vector<TracedOp>* ops;
};

// One for each stream, see control(). The functions do here what they do on the CPU and in a plan,
// where ops are done when they return; ops/cuda/context.h has those of a GPU.
class StreamControl : public BackendContext {
 public:
  // From now on HostRead::wait, CopyToHost and Synchronize call `check` after they have waited for
  // the stream and before they return, so that nobody uses what a failed job left: when ranks are
  // lost, collectives end with undefined results (parallel/nccl.h), and `check` throws. An empty
  // function ends this.
  virtual void check_after_waits(std::function<void()> /*check*/) {}

  // From now on kernels that are recorded (core/graph.h) may begin before the one in front of them
  // has ended (kernels/primitives/dependent_launch.cuh), which changes no result. Off at first.
  virtual void set_overlap(bool /*on*/) {}

  // Starts to copy x, f64, to the host.
  virtual std::unique_ptr<HostRead> read(const Tensor& x);

  // Ops on the stream use these choices, as choices() returned them, perhaps to another rank.
  virtual void set_choices(const std::string& /*choices*/) {}
  // All choices known now, "" where ops run in one way only. If told to remember them, keeps them
  // for later programs.
  virtual std::string choices(bool /*remember*/) { return {}; }

  // Marks the beginning of an op in the stream's work and returns the mark's number; from its end
  // on, the next Synchronize adds the time between the two to the stream's profile. Negative if the
  // time is that of the host.
  virtual int begin_mark(std::string_view /*op*/) { return -1; }
  virtual void end_mark(int /*mark*/) {}

  // Traces the ops that each of these streams is given from now on, by one clock: what ran beside
  // what. The stream's next Synchronize adds them to the list beside it, in their order, and ends
  // the trace of that stream. The streams must have profiles (Stream::set_profile). Throws
  // ExitCode::kInternal for a stream that is not on a GPU: elsewhere nothing runs beside anything.
  virtual void trace(const std::vector<Traced>& streams);
};

// The stream's own, made at the first call.
StreamControl& control(Stream& s);

// Between these two calls, ops that can run in several ways time them and keep the fastest; what
// they write is undefined. `known` holds the choices of an earlier run on such a device, which are
// kept. end_tuning() returns StreamControl::choices(remember). Ranks that time the same ops may
// choose differently, so only the one whose choices they all use may remember its own.
void begin_tuning(Stream& s, const std::string& known);
std::string end_tuning(Stream& s, bool remember = true);

// While it exists, the time of the work that the stream is given adds to `name` in the stream's
// profile, if it has one.
class WorkTimer {
 public:
  WorkTimer(Stream& s, std::string_view name);
  ~WorkTimer();
  WorkTimer(const WorkTimer&) = delete;
  WorkTimer& operator=(const WorkTimer&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  Stream& stream_;
  std::string_view name_;
  OpProfile* profile_;
  int mark_ = -1;
  Clock::time_point begin_;
};

// Calls work(), which gives the stream work, and adds its time to `name` in the stream's profile.
template <typename Work>
void timed(Stream& s, std::string_view name, const Work& work) {
  const WorkTimer timer(s, name);
  work();
}

// Stream::wait, timed like an op: the time of `name` is how long the stream stood idle.
void await(Stream& s, const Event& event, std::string_view name = "await");

namespace cuda {
StreamControl& control(const Stream& s);
}  // namespace cuda

}  // namespace sbtrain::ops
