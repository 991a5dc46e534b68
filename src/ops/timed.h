// Time of work that is no op, in the profile of its stream.
#pragma once

#include <memory>
#include <optional>
#include <string_view>

#include "core/op_profile.h"
#include "core/stream.h"
#include "ops/cuda/timer.h"

namespace sbtrain::ops {

// While it exists, the time of the work that the stream is given adds to `name` in the stream's
// profile, if it has one.
class WorkTimer {
 public:
  WorkTimer(Stream& s, std::string_view name);

 private:
  std::optional<OpTimer> host_;
  std::unique_ptr<cuda::DeviceTimer> device_;
};

// Calls work(), which gives the stream work, and adds its time to `name` in the stream's profile.
template <typename Work>
void timed(Stream& s, std::string_view name, const Work& work) {
  const WorkTimer timer(s, name);
  work();
}

}  // namespace sbtrain::ops
