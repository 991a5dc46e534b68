// Options of commands that run a trained model on longer texts than it was trained with.
#pragma once

#include <string>

#include "config/config.h"

namespace CLI {
class App;
}

namespace sbtrain {

struct RopeOptions {
  std::string scaling;  // empty: as the model's configuration has it
  double factor = 1.0;
  int64_t train_length = 0;  // 0: the sequence length of the run

  void add(CLI::App& command);
  // Changes every attention module with rotary positions. Throws ExitCode::kUsage where there is
  // none.
  void apply(Config& config) const;
};

}  // namespace sbtrain
