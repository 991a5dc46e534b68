// Checks that involve several keys.
#pragma once

#include <fmt/format.h>

#include <string>
#include <vector>

#include "train/run_config.h"

namespace sbtrain::schema {

struct CrossProblem {
  std::string key;  // where the user should look first
  std::string message;
};

// visit(key, duration) for each duration of a configuration.
template <class C, class Visit>
void for_each_duration(C& config, const Visit& visit) {
  for (size_t i = 0; i < config.stages.size(); ++i) {
    visit(fmt::format("stages.{}.length", i), config.stages[i].length);
    visit(fmt::format("stages.{}.schedule.warmup", i), config.stages[i].schedule.warmup);
  }
  visit("validation.every", config.validation.every);
  visit("checkpoint.every", config.checkpoint.every);
}

std::vector<CrossProblem> cross_field_problems(const Config& config);

// Names in checkpoint.allow_changes that can never name a change. This is no part of the checks
// above, since it is for the user of a file or option: a checkpoint that was saved with such a name
// stays readable.
std::vector<CrossProblem> allowed_change_problems(const Config& config);

}  // namespace sbtrain::schema
