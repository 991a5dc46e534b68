// What moves weights and gradients between GPUs, where train.gather_engine and train.reduce_engine
// are auto.
#pragma once

#include "core/backend.h"
#include "job/control.h"
#include "job/launch.h"
#include "train/run_config.h"

namespace sbtrain {

// With copy engines or multiprocessors in place of auto. Gradients that are auto go as the weights.
TrainConfig with_engines(TrainConfig train, bool copy_engines);

// The copy engines where all ranks have GPUs of one machine that NVLink connects, and NCCL's
// environment allows it. All ranks call it, and get the same; it says what it has chosen.
TrainConfig with_engines(const TrainConfig& train, Control& control, const Launch& launch,
                         Backend backend);

}  // namespace sbtrain
