#include "ops/timed.h"

#include "core/build_options.h"

namespace sbtrain::ops {

#if !SBTRAIN_HAS_CUDA
// A build without CUDA has no stream to mark; the pointer of WorkTimer is never set.
cuda::DeviceTimer::DeviceTimer(const Stream& s, std::string_view) : stream_(s) {}
cuda::DeviceTimer::~DeviceTimer() = default;
#endif

WorkTimer::WorkTimer(Stream& s, std::string_view name) {
  if (s.profile() == nullptr) return;
  if (s.backend() == Backend::kCuda) {
    device_ = std::make_unique<cuda::DeviceTimer>(s, name);
  } else {
    host_.emplace(s.profile(), name);
  }
}

}  // namespace sbtrain::ops
