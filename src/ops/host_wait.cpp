#include "ops/host_wait.h"

#include "core/device.h"

namespace sbtrain::ops {

void check_after_waits(Stream& s, std::function<void()> check) {
  if constexpr (kHasCuda) {
    if (s.backend() == Backend::kCuda) cuda::set_wait_check(s, std::move(check));
  }
}

}  // namespace sbtrain::ops
