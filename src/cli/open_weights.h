// Finds the weights that a path names: a checkpoint, a run, or a Hugging Face folder.
#pragma once

#include <string>

#include "train/trainer.h"

namespace sbtrain {

// Of a run these are the newest that are whole. Throws ExitCode::kNoCheckpoint if there are none or
// they are damaged, ExitCode::kConfig for a
// Hugging Face folder of a model that does not exist here.
InitialWeights open_weights(const std::string& path);

}  // namespace sbtrain
