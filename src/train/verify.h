// Whether a checkpoint, whose files are whole, holds what a run needs to continue from it.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "train/run_config.h"

namespace sbtrain {

// Everything that is wrong, naming file and tensor: tensors that the model of `config` (the
// checkpoint's own) lacks or has in another shape, tensors that are missing, and a state.json that
// cannot be read or belongs to another step. Empty: nothing.
std::vector<std::string> verify_contents(const CheckpointReader& checkpoint, const Config& config);

}  // namespace sbtrain
