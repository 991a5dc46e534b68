// Starting threads where a failure can be reported. The limits on processes (`ulimit -u`, a
// cgroup's pids.max) and on memory decide how many threads a process may start. OpenMP ends the
// process with exit code 1 when it cannot start one, and libraries call std::terminate.
#pragma once

#include <functional>
#include <string_view>

namespace sbtrain {

// Throws ExitCode::kOutOfMemory unless `count` more threads can run at once; starts and ends them
// to find out. `advice` ends the message.
void require_threads(int count, std::string_view advice);

// Starts the threads with which OpenMP runs the parallel regions of the calling thread. They stay,
// so that no later region has to start any. Throws ExitCode::kOutOfMemory if they cannot be
// started. A second call in the same thread does nothing.
void start_parallel_threads();

// Calls a function of a library that may wait for ever, in a thread of its own, and `check` again
// and again meanwhile. An exception of `check` leaves the thread behind in the call: `call` may
// refer to nothing that ends before the process, and exit() then ends the process at once, with its
// code and with what was written to files, but without destructors of static objects and of
// libraries, which would take from the thread what it works with.
void call_or_leave(std::function<void()> call, const std::function<void()>& check);

}  // namespace sbtrain
