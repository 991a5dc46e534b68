// Options of commands that run a trained model on longer texts than it was trained with.
#pragma once

#include <string_view>

#include "attention/rotary.h"
#include "cli/options.h"
#include "train/run_config.h"

namespace sbtrain {

struct RopeOptions {
  RotaryScaling scaling = RotaryScaling::kNone;
  double factor = 1.0;
  int64_t train_length = 0;  // 0: the sequence length of the run
  Option kind{};             // not given: as in the model's configuration

  void add(Command command);
  std::string_view name() const;  // of the scaling; empty if it is not given
  // Changes every attention module with rotary positions. Throws ExitCode::kUsage if there is
  // none.
  void apply(Config& config) const;
};

}  // namespace sbtrain
