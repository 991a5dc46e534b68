// The configuration of a run as its checkpoint keeps it.
#pragma once

#include "checkpoint/checkpoint.h"
#include "checkpoint/layout.h"
#include "config/schema.h"
#include "train/run_config.h"

namespace sbtrain {

// The configuration with which the checkpoint was saved. A key that is younger than the checkpoint
// has its default. Throws ExitCode::kConfig naming the file.
inline Config stored_config(const CheckpointReader& checkpoint) {
  return parse_config(checkpoint.config_yaml(), (checkpoint.folder() / kConfigName).string());
}

}  // namespace sbtrain
