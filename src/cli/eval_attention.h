// The options of the part of sbtrain eval that examines attention.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/options.h"

namespace sbtrain {

struct AttentionEvalOptions {
  std::string maps;                // folder to write maps to
  std::string text;                // the input of the maps: text,
  std::vector<int32_t> token_ids;  // or tokens,
  int64_t task_example = -1;       // or a held-out example of the run's task
  std::string true_positions;      // JSON file with examples
  int64_t task_positions = 0;      // or this number of held-out examples of the run's task
  double threshold = 0.5;
  Option threshold_option{};  // tells whether the threshold was given

  // To be called when the command has its options of losses, which these exclude.
  void add(Command command);
  void check() const;  // throws ExitCode::kUsage for options that do not go together
  bool asked() const { return !maps.empty() || !true_positions.empty() || task_positions > 0; }
  bool of_task() const { return task_example >= 0 || task_positions > 0; }
};

}  // namespace sbtrain
