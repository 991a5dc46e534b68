// Starting threads where a failure can be reported. The limits on processes (`ulimit -u`, a
// cgroup's pids.max) and on memory decide how many threads a process may start. OpenMP ends the
// process with exit code 1 when it cannot start one, and libraries call std::terminate.
#pragma once

#include <string_view>

namespace sbtrain {

// Throws ExitCode::kOutOfMemory unless `count` more threads can run at once; starts and ends them
// to find out. `advice` ends the message.
void require_threads(int count, std::string_view advice);

// Starts the threads with which OpenMP runs the parallel regions of the calling thread. They stay,
// so that no later region has to start any. Throws ExitCode::kOutOfMemory if they cannot be
// started. A second call in the same thread does nothing.
void start_parallel_threads();

}  // namespace sbtrain
