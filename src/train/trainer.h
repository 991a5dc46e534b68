// A training run: from a configuration to a trained, saved model, across interruptions.
#pragma once

#include <functional>
#include <map>
#include <string>

#include "checkpoint/checkpoint.h"
#include "core/error.h"
#include "core/memory.h"
#include "job/launch.h"
#include "train/initial_weights.h"
#include "train/run_config.h"

namespace sbtrain {

// The configuration as the command line resolved it, in the forms that a run stores.
struct ResolvedConfig {
  Config config;
  std::string yaml;                           // written to <run>/config.yaml
  std::map<std::string, std::string> fields;  // flattened, compared on resume
  // The fields of the configuration that a checkpoint was saved with.
  std::function<std::map<std::string, std::string>(const CheckpointReader&)> stored_fields;
};

// Trains until the schedule ends (ExitCode::kDone) or a signal asks to stop
// (ExitCode::kPreempted, after saving). Writes to config.run_dir(): config.yaml, run.json,
// status.json, metrics.jsonl, tensorboard/, checkpoints/. With checkpoint.resume auto, an
// interrupted run continues from its newest good checkpoint, and its results equal those of an
// uninterrupted run bit for bit. Errors are thrown with the exit codes of core/error.h.
//
// A run that begins, and does not continue from a checkpoint of its own, takes its weights from
// `init` if that is given; its moments, data and schedule start anew. ExitCode::kConfig if the
// names or shapes differ, or the tokenizer does. <run>/init_from.json records it.
//
// `job` says which of its ranks this process is: all ranks call train() with the same configuration
// and end with the same code. Rank 0 alone writes reports, and holds the run's lock.
ExitCode train(const ResolvedConfig& resolved, Backend backend, const Job& job = {},
               const InitFrom& init = {});

}  // namespace sbtrain
