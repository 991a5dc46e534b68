// Ranges of numbers that options accept.
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <string>

namespace sbtrain {

// A number from `low` to `high`. Unlike CLI::Range, refuses NaN: CLI::Range asks whether the value
// lies outside, and no comparison with NaN is true.
inline CLI::Validator in_range(double low, double high) {
  const std::string range = fmt::format("{:g} to {:g}", low, high);
  const auto check = [low, high, range](const std::string& text) {
    double value = 0;
    const bool number = CLI::detail::lexical_cast(text, value);
    if (number && value >= low && value <= high) return std::string();
    return fmt::format("'{}' is not a number from {}", text, range);
  };
  return CLI::Validator(check, range, "RANGE");
}

}  // namespace sbtrain
