// What the host does once it has waited for a stream.
#pragma once

#include <functional>
#include <utility>

#include "core/device.h"
#include "core/stream.h"

namespace sbtrain::ops {

namespace cuda {
void set_wait_check(Stream& s, std::function<void()> check);
}  // namespace cuda

// From now on HostRead::wait, CopyToHost and Synchronize call `check` after they have waited for
// `s` and before they return, so that nobody uses what a failed job left: when ranks are lost,
// collectives end with undefined results (parallel/nccl.h), and `check` throws. An empty function
// ends this. Where ops are done when they return, as on the CPU, the call does nothing.
inline void check_after_waits(Stream& s, std::function<void()> check) {
  if constexpr (kHasCuda) {
    if (s.backend() == Backend::kCuda) cuda::set_wait_check(s, std::move(check));
  }
}

}  // namespace sbtrain::ops
