// train.precision: auto, the faster of bf16 and fp8 on the machine where a run starts.
#pragma once

#include <filesystem>
#include <string>

#include "core/backend.h"
#include "parallel/communicator.h"
#include "train/run_config.h"

namespace sbtrain {

struct PrecisionChoice {
  Precision precision = Precision::kBf16;
  std::string reason;  // for the log and the run folder
};

// Times steps of a model that has one layer of each kind of the configuration's, with its widths
// and micro-batches, in both precisions. fp8 is chosen where it is faster by at least 2%, since it
// rounds more coarsely. Without a GPU that has fp8 nothing is timed. All ranks call it, and have
// the choice of rank 0.
PrecisionChoice choose_precision(const Config& config, Backend backend, Communicator& ranks);

// The same, kept in a file of the run folder, <run>/precision.json, by which a run goes on when it
// resumes. What is no choice there throws ExitCode::kStorage. Only the rank that `writes` touches
// the file.
PrecisionChoice keep_precision(const Config& config, Backend backend, Communicator& ranks,
                               const std::filesystem::path& file, bool writes);

}  // namespace sbtrain
