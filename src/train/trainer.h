// A training run: from a configuration to a trained, saved model, across interruptions.
#pragma once

#include <map>
#include <string>

#include "config/config.h"
#include "core/error.h"
#include "core/memory.h"
#include "parallel/launch.h"

namespace sbtrain {

// The configuration as the command line resolved it, in the forms that a run stores.
struct ResolvedConfig {
  Config config;
  std::string yaml;                           // written to <run>/config.yaml
  std::map<std::string, std::string> fields;  // flattened, compared on resume
};

// Trains until the schedule ends (ExitCode::kDone) or a signal asks to stop
// (ExitCode::kPreempted, after saving). Writes to config.run_dir(): config.yaml, run.json,
// metrics.jsonl, tensorboard/, checkpoints/. With checkpoint.resume auto, an interrupted run
// continues from its newest good checkpoint, and its results equal those of an uninterrupted run
// bit for bit. Errors are thrown with the exit codes of core/error.h.
//
// `job` says which of its ranks this process is: all ranks call train() with the same configuration
// and end with the same code. Rank 0 alone writes reports, and holds the run's lock.
ExitCode train(const ResolvedConfig& resolved, Backend backend, const Job& job = {});

}  // namespace sbtrain
