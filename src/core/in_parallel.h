// Work on the host that may throw, spread over OpenMP's threads.
#pragma once

#include <cstdint>
#include <exception>

namespace sbtrain {

// Calls body(i) for each i below `count` on all threads, in any order, and rethrows what one of
// them throws.
template <typename Body>
void in_parallel(int64_t count, const Body& body) {
  std::exception_ptr error;
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t i = 0; i < count; ++i) {
    try {
      body(i);
    } catch (...) {
#pragma omp critical
      error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace sbtrain
