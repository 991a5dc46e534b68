// Speed of a training step, and where the time goes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config/config.h"
#include "core/memory.h"

namespace sbtrain {

struct BenchOptions {
  int64_t warmup = 3;
  int64_t steps = 20;
};

struct BenchPart {
  std::string name;    // "matrix products", "attention", ...
  double seconds = 0;  // of one step, mean
};

struct BenchResult {
  int64_t tokens_per_step = 0;
  double step_seconds = 0;  // median
  double slowest_seconds = 0;
  double tokens_per_second = 0;  // at the median
  double flops_causal = 0;       // per second, attention counted as the causal half
  double flops_full = 0;         // per second, attention counted as the full square
  size_t memory_bytes = 0;       // planned
  std::vector<BenchPart> parts;  // in a run of its own, so that timing does not slow the step
};

// Trains on random tokens: documents of sequence_length, no data and no files needed.
BenchResult bench_step(const Config& config, Backend backend, const BenchOptions& options);

}  // namespace sbtrain
