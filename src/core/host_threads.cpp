#include "core/host_threads.h"

#include <omp.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <system_error>
#include <thread>
#include <vector>

#include "core/error.h"

namespace sbtrain {
namespace {

// As a function of on_exit(), which the last one to be registered runs before all others.
void end_at_once(int code, void* /*unused*/) {
  std::fflush(nullptr);
  ::_exit(code);
}

}  // namespace

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

void call_or_leave(std::function<void()> call, const std::function<void()>& check) {
  std::packaged_task<void()> task(std::move(call));
  std::future<void> done = task.get_future();
  std::thread(std::move(task)).detach();
  try {
    while (done.wait_for(std::chrono::milliseconds(10)) != std::future_status::ready) check();
  } catch (...) {
    ::on_exit(end_at_once, nullptr);
    throw;
  }
  done.get();
}

}  // namespace sbtrain
