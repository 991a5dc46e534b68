// Replaces launches on a GPU by the emulator (emulation/emulator.h), with all shared memory
// poisoned. Kernels run one after the other, so there is nothing to wait for.
#pragma once

#include "kernels/launch.h"

namespace sbtrain::kernels {

inline void let_next_kernel_begin() {}
inline void wait_for_previous_kernel() {}
inline void prefetch_to_l2(const void*, uint32_t) {}

template <typename... Parameters>
bool compiled_for_hopper(void (*)(Parameters...)) {
  return true;
}

struct LaunchShape {
  dim3 grid;
  int threads;
  size_t shared_bytes = 0;
};
template <typename... Parameters, typename... Arguments>
void launch_early(const char*, bool, cudaStream_t, void (*kernel)(Parameters...),
                  const LaunchShape& shape, const Arguments&... arguments) {
  emulation::check(shape.shared_bytes <= kMaxSharedBytes, "too much shared memory");
  std::memset(memory, 0xff, sizeof(memory));
  emulation::run_grid({shape.grid.x, shape.grid.y, shape.grid.z},
                      {static_cast<unsigned>(shape.threads)}, emulation::Timing::kAtOnce,
                      [&] { kernel(arguments...); });
}

}  // namespace sbtrain::kernels
