#include "core/host_threads.h"

#include <omp.h>

#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

#include "core/error.h"

namespace sbtrain {

void require_threads(int count, std::string_view advice) {
  std::atomic<bool> done = false;
  std::vector<std::thread> threads;
  std::string reason;
  try {
    for (int n = 0; n < count; ++n) {
      threads.emplace_back([&done] { done.wait(false); });
    }
  } catch (const std::system_error& error) {
    reason = error.code().message();
  } catch (const std::bad_alloc&) {
    reason = "out of memory";
  }
  done = true;
  done.notify_all();
  for (std::thread& thread : threads) thread.join();
  if (reason.empty()) return;
  fail(
      ExitCode::kOutOfMemory,
      "cannot start {} threads, only {}: {}; the limits on processes (ulimit -u) or memory (ulimit "
      "-v) are too low. {}",
      count, threads.size(), reason, advice);
}

void start_parallel_threads() {
  thread_local bool started = false;
  if (started || omp_in_parallel() != 0) return;
  require_threads(omp_get_max_threads() - 1,
                  "Fewer threads are used with OMP_NUM_THREADS in the environment.");
#pragma omp parallel
  {}
  started = true;
}

}  // namespace sbtrain
