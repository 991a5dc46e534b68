#include "cli/backend.h"

#include "core/error.h"

namespace sbtrain {

Backend select_backend(const std::string& device) {
  if (device == "cuda") {
    fail(ExitCode::kUsage,
         "device: cuda, but this build has the CPU backend alone. Models of up to some ten million "
         "parameters train with --device=cpu; `--dry-run` plans larger ones.");
  }
  return Backend::kCpu;
}

Backend planned_backend(const std::string& device) {
  return device == "cuda" ? Backend::kCuda : Backend::kCpu;
}

}  // namespace sbtrain
