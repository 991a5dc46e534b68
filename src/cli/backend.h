// The `device` key.
#pragma once

#include "core/backend.h"
#include "core/device_choice.h"
#include "core/memory.h"

namespace sbtrain {

// The backend that `device` (auto, cpu, cuda) means on this machine and in this build. Throws
// ExitCode::kUsage if that backend is not available.
Backend select_backend(DeviceChoice device);

// The backend that a plan is made for; needs neither the device nor a build with that backend.
Backend planned_backend(DeviceChoice device);

}  // namespace sbtrain
