#pragma once

#include "parallel/make_communicator.h"
#include "train/run_config.h"

namespace sbtrain {

// What a training run asks of NCCL.
CommunicatorOptions communicator_options(const TrainConfig& train);

}  // namespace sbtrain
