// The plan of a run, made without device or data: `sbtrain train --dry-run`.
#pragma once

#include <string>

#include "config/config.h"
#include "core/memory.h"
#include "parallel/network.h"

namespace sbtrain {

// The memory of a training run on `target`, planned by running its step on Backend::kPlan.
MemoryReport plan_memory(const Config& config, Backend target);

// Dense bf16 of an H100 or H200.
inline constexpr double kGpuPeakTflops = 989;

struct DryRunOptions {
  double mfu = 0.4;        // model FLOPs utilisation that the duration is estimated at
  double peak_tflops = 0;  // of the device; 0: kGpuPeakTflops, or not known on the CPU
  int world = 0;           // ranks to plan a run of (train/scale.h); 0: none
  int gpus_per_node = 8;
  Machine machine;

  double gpu_peak_tflops() const { return peak_tflops > 0 ? peak_tflops : kGpuPeakTflops; }
};

// Parameters, attention, memory, FLOPs, tokens, data, schedule and duration, as text. Files that
// are missing are named as such.
std::string describe_run(const Config& config, Backend target, const DryRunOptions& options);

}  // namespace sbtrain
