// Checks that involve several keys.
#pragma once

#include <string>
#include <vector>

#include "config/config.h"

namespace sbtrain::schema {

struct CrossProblem {
  std::string key;  // the one to look at first
  std::string message;
};

std::vector<CrossProblem> cross_field_problems(const Config& config);

}  // namespace sbtrain::schema
