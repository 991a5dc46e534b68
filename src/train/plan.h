// The plan of a run, made without device or data: `sbtrain train --dry-run`.
#pragma once

#include <string>

#include "core/memory.h"
#include "train/run_config.h"

namespace sbtrain {

class Transformer;

// The memory of a training run on `target`, planned by running its step on Backend::kPlan.
MemoryReport plan_memory(const Config& config, Backend target);

// Dense bf16 of an H100 or H200.
inline constexpr double kGpuPeakTflops = 989;

// Of the GPU that a run is planned for.
double gpu_peak_tflops(const Config& config);

// Floating-point operations of a training step for each of its tokens, forward and backward,
// without recomputation. causal_ counts attention to half of a row, which is what causality leaves,
// full_ to all of it.
double causal_flops_per_token(const Transformer& model, const Config& config);
double full_flops_per_token(const Transformer& model, const Config& config);

struct DryRunOptions {
  int world = 0;  // ranks to plan a run of (train/scale.h); 0: none
  int gpus_per_node = 8;
};

// Parameters, attention, memory, FLOPs, tokens, data, schedule and duration, as text. Files that
// are missing are named as such.
std::string describe_run(const Config& config, Backend target, const DryRunOptions& options);

}  // namespace sbtrain
