#include "ops/chain.h"

#include "core/device.h"

namespace sbtrain::ops {

void run_chained(Stream& s, const std::function<void()>& work) {
  if constexpr (kHasCuda) {
    if (s.backend() == Backend::kCuda) return cuda::run_chained(s, work);
  }
  work();
}

}  // namespace sbtrain::ops
