// The counters of a run. Together with the weights and moments they are all that a checkpoint needs
// to continue the run bit for bit: the learning rate and the stage follow from the step, random
// numbers from the seed.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "train/guard.h"

namespace sbtrain {

struct RunState {
  int64_t step = 0;     // finished optimizer steps, skipped ones included
  int64_t updates = 0;  // applied updates: what AdamW's bias correction counts
  int64_t tokens = 0;   // of all finished steps
  double lr = 0;        // of the last finished step
  Guard::State guard;
  RunningLoss running;
  bool validation_due = false;  // at this step, and interrupted or not begun
  bool stopped = false;         // validation.stop_accuracy was reached: the run is complete
  std::string loader;           // LoaderState as text
};

std::string format_run_state(const RunState& state);
// Throws ExitCode::kNoCheckpoint naming `file` and the field, for values that no run has as well.
RunState parse_run_state(const std::string& text, const std::string& file);

// The configuration keys that must not change when a run is resumed, with their values: those of
// the model and those of the order in which it sees the data.
std::map<std::string, std::string> identity_fields(
    const std::map<std::string, std::string>& config_fields);

// Throws ExitCode::kConfig with every identity field that differs between the checkpoint
// `folder` and this run, except those in `allowed` (checkpoint.allow_changes).
void check_identity(const std::map<std::string, std::string>& saved,
                    const std::map<std::string, std::string>& now,
                    const std::vector<std::string>& allowed, const std::string& folder);

}  // namespace sbtrain
