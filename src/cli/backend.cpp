#include "cli/backend.h"

#include <omp.h>

#include <mutex>

#include "core/device.h"
#include "core/error.h"
#include "core/host_threads.h"
#include "core/log.h"
#include "ops/cpu/openblas.h"

namespace sbtrain {

namespace {

Backend available_backend(DeviceChoice device) {
  std::string why;
  if (device == DeviceChoice::kCpu) return Backend::kCpu;
  if (cuda_available(&why)) return Backend::kCuda;
  if (device == DeviceChoice::kCuda) {
    fail(ExitCode::kUsage,
         "device: cuda, but {}. Models of up to some ten million parameters train with "
         "--device=cpu; `--dry-run` plans larger ones.",
         why);
  }
  // A command may ask more than once: for its number of ranks, and as each of them.
  static std::once_flag told;
  if (has_cuda()) std::call_once(told, [&] { log_info("running on the CPU: {}", why); });
  return Backend::kCpu;
}

}  // namespace

Backend select_backend(DeviceChoice device) {
  const Backend backend = available_backend(device);
  // Whatever cannot be had is missed here, and not inside of a parallel region.
  start_parallel_threads();
  if (backend == Backend::kCpu) ops::cpu::reserve_buffers(omp_get_max_threads());
  return backend;
}

Backend planned_backend(DeviceChoice device) {
  if (device == DeviceChoice::kCpu) return Backend::kCpu;
  return device == DeviceChoice::kCuda || cuda_available() ? Backend::kCuda : Backend::kCpu;
}

}  // namespace sbtrain
