// The README.md of an exported model.
#pragma once

#include <string>

#include "checkpoint/checkpoint.h"
#include "export/hf_layout.h"
#include "train/run_config.h"

namespace sbtrain {

// What the model is, what it was trained on, how far and to what loss, as the checkpoint, its
// configuration and the metrics of its run folder say. `average`: the weights are the average of
// the run's, which has no validation loss.
std::string model_card(const CheckpointReader& checkpoint, const Config& config,
                       const HfLayout& layout, bool average);

}  // namespace sbtrain
