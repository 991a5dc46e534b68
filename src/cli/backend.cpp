#include "cli/backend.h"

#include <spdlog/spdlog.h>

#include "core/device.h"
#include "core/error.h"

namespace sbtrain {

Backend select_backend(DeviceChoice device) {
  std::string why;
  if (device == DeviceChoice::kCpu) return Backend::kCpu;
  if (cuda_available(&why)) return Backend::kCuda;
  if (device == DeviceChoice::kCuda) {
    fail(ExitCode::kUsage,
         "device: cuda, but {}. Models of up to some ten million parameters train with "
         "--device=cpu; `--dry-run` plans larger ones.",
         why);
  }
  if (kHasCuda) spdlog::info("running on the CPU: {}", why);
  return Backend::kCpu;
}

Backend planned_backend(DeviceChoice device) {
  if (device == DeviceChoice::kCpu) return Backend::kCpu;
  return device == DeviceChoice::kCuda || cuda_available() ? Backend::kCuda : Backend::kCpu;
}

}  // namespace sbtrain
