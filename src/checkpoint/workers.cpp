#include "checkpoint/workers.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace sbtrain {
namespace {

constexpr int64_t kMaxThreads = 16;

}  // namespace

void run_parallel(int64_t count, const std::function<void(int64_t)>& work) {
  std::atomic<int64_t> next = 0;
  std::mutex mutex;
  std::exception_ptr first_error;
  const auto take_work = [&] {
    try {
      for (int64_t i = next++; i < count; i = next++) work(i);
    } catch (...) {
      next = count;
      const std::lock_guard lock(mutex);
      if (!first_error) first_error = std::current_exception();
    }
  };
  const int64_t processors = std::max(1U, std::thread::hardware_concurrency());
  const int64_t threads = std::min({processors, kMaxThreads, count});
  std::vector<std::thread> others;
  try {
    for (int64_t i = 1; i < threads; ++i) others.emplace_back(take_work);
  } catch (const std::system_error&) {  // no more threads
  }
  take_work();
  for (std::thread& thread : others) thread.join();
  if (first_error) std::rethrow_exception(first_error);
}

}  // namespace sbtrain
