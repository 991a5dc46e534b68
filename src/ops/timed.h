// Time of work that is no op, in the profile of its stream.
#pragma once

#include <string_view>

#include "core/device.h"
#include "core/op_profile.h"
#include "core/stream.h"
#include "ops/cuda/timer.h"

namespace sbtrain::ops {

// Calls work(), which gives the stream work, and adds its time to `name` in the stream's profile.
template <typename Work>
void timed(Stream& s, std::string_view name, const Work& work) {
  if constexpr (kHasCuda) {
    if (s.backend() == Backend::kCuda) {
      const cuda::DeviceTimer timer(s, name);
      return work();
    }
  }
  const OpTimer timer(s.profile(), name);
  work();
}

}  // namespace sbtrain::ops
