// The plan of a run, made without device or data: `sbtrain train --dry-run`.
#pragma once

#include <string>

#include "config/config.h"
#include "core/memory.h"

namespace sbtrain {

// The memory of a training run on `target`, planned by running its step on Backend::kPlan.
MemoryReport plan_memory(const Config& config, Backend target);

struct DryRunOptions {
  double mfu = 0.4;            // model FLOPs utilisation that the duration is estimated at
  double peak_tflops = 989.0;  // dense bf16 of an H100 or H200
};

// Parameters, memory, FLOPs, tokens, schedule and duration, as text.
std::string describe_run(const Config& config, Backend target, const DryRunOptions& options);

}  // namespace sbtrain
