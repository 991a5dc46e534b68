// A span of training, in optimizer steps, in tokens or in epochs of a task: "300 steps",
// "2e9 tokens", "64 epochs", or a bare number of steps.
#pragma once

#include <cstdint>

namespace sbtrain {

struct Duration {
  enum class Unit : uint8_t { kSteps, kTokens, kEpochs };
  int64_t count = 0;
  Unit unit = Unit::kSteps;
  // Whole optimizer steps, rounded up. Not for epochs: loading a configuration turns them into
  // tokens.
  int64_t steps(int64_t tokens_per_step) const {
    return unit == Unit::kSteps ? count : (count + tokens_per_step - 1) / tokens_per_step;
  }
  bool operator==(const Duration&) const = default;
};

}  // namespace sbtrain
