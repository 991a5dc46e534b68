#include "ops/host_wait.h"

#include "core/build_options.h"

namespace sbtrain::ops {

void check_after_waits(Stream& s, std::function<void()> check) {
#if SBTRAIN_HAS_CUDA
  if (s.backend() == Backend::kCuda) cuda::set_wait_check(s, std::move(check));
#endif
}

}  // namespace sbtrain::ops
