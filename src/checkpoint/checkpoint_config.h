#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/duration.h"

namespace sbtrain {

struct CheckpointConfig {
  Duration every{500};
  int64_t keep = 3;             // newest checkpoints kept, beside the newest known to be good
  bool async = true;            // write in the background; training waits only for the copy
  std::string resume = "auto";  // auto | none | last-good | a step | path of a checkpoint
  int64_t max_failures = 3;     // failed saves in a row before giving up
  std::vector<std::string> allow_changes;  // keys that may differ from the resumed run's
  bool operator==(const CheckpointConfig&) const = default;
};

}  // namespace sbtrain
