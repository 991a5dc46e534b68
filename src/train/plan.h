// The plan of a run, made without device or data: `sbtrain train --dry-run`.
#pragma once

#include <string>

#include "config/config.h"
#include "core/memory.h"

namespace sbtrain {

// The memory of a training run on `target`, planned by running its step on Backend::kPlan.
MemoryReport plan_memory(const Config& config, Backend target);

struct DryRunOptions {
  double mfu = 0.4;  // model FLOPs utilisation that the duration is estimated at
  double peak_tflops =
      0;  // of the device; 0: 989, dense bf16 of an H100 or H200, unless on the CPU
};

// Parameters, attention, memory, FLOPs, tokens, data, schedule and duration, as text. Files that
// are missing are named as such.
std::string describe_run(const Config& config, Backend target, const DryRunOptions& options);

}  // namespace sbtrain
