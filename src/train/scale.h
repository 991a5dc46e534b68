// The plan of a run on many GPUs, made without any: `sbtrain train --dry-run --world N`.
//
// Memory and traffic are exact, since they come from the step itself, run as one rank of such a job
// on Backend::kPlan. Times are estimates (parallel/network.h).
#pragma once

#include <string>
#include <vector>

#include "core/memory.h"
#include "parallel/network.h"
#include "parallel/traffic.h"
#include "train/plan.h"
#include "train/run_config.h"

namespace sbtrain {

// What rank 0 of `world` holds and moves; rank r's plan differs in nothing.
struct RankPlan {
  Config config;  // with the sharding and the micro-batch of this plan
  MemoryReport memory;
  size_t libraries = 0;   // bytes that libraries take beside it
  size_t host = 0;        // bytes of the host's memory (train.offload)
  Traffic traffic;        // of one step
  double compute = 0;     // seconds of one step: forward and backward passes at options.mfu
  double optimizer = 0;   // seconds of one step: this rank's part of the update
  bool fits = false;      // into the machine's memory
  StepEstimate estimate;  // without the optimizer
  size_t total_bytes() const { return memory.total_bytes() + libraries; }
  double seconds() const { return estimate.total() + optimizer; }
};

// Throws ExitCode::kConfig when train.batch is not a multiple of world * train.micro_batch.
RankPlan plan_rank(const Config& config, Backend target, const DryRunOptions& options);

// The plan of every mode of sharding, and of other micro-batches of a power of two sequences, which
// divide the batch among the ranks: those of the configured micro-batch first.
std::vector<RankPlan> plan_choices(const Config& config, Backend target,
                                   const DryRunOptions& options);

// Memory of a rank by class and mode; the collectives of a step; its time, tokens per second and
// days to the end; the fastest choice that fits. Where the configured micro-batch is too large for
// so many ranks, the plan is that of the largest that is not, and says so.
std::string describe_scale(const Config& config, Backend target, const DryRunOptions& options);

}  // namespace sbtrain
