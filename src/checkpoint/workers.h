// Spreads independent pieces of work over threads of its own, so that hashing and copying run
// beside training and at the disk's rate.
#pragma once

#include <cstdint>
#include <functional>

namespace sbtrain {

// Calls work(0), ..., work(count - 1), each once, on as many threads as the process has processors,
// at most 16 and at most `count`; the caller's is one of them. Threads that the system refuses to
// start are done without. When a call throws, no further one begins, and the first exception is
// thrown here once all threads have ended.
void run_parallel(int64_t count, const std::function<void(int64_t)>& work);

}  // namespace sbtrain
