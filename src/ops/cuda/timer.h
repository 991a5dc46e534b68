// Time of an op on the GPU, for `sbtrain bench`. Needs no CUDA header, so that every build can
// name it.
#pragma once

#include <string_view>

#include "core/stream.h"

namespace sbtrain::ops::cuda {

// Marks the beginning and end of an op on the stream if the stream has a profile; synchronize()
// adds the time between them to the profile.
class DeviceTimer {
 public:
  DeviceTimer(const Stream& s, std::string_view op);
  ~DeviceTimer();
  DeviceTimer(const DeviceTimer&) = delete;
  DeviceTimer& operator=(const DeviceTimer&) = delete;

 private:
  const Stream& stream_;
  int index_ = -1;
};

}  // namespace sbtrain::ops::cuda
