// Numbers as messages show them.
#pragma once

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <string>

namespace sbtrain {

// The sign of a NaN means nothing, and would be shown as in "-nan".
inline double without_nan_sign(double value) {
  return std::isnan(value) ? std::numeric_limits<double>::quiet_NaN() : value;
}

// A number that was computed, such as a loss: six digits, "nan", "inf" or "-inf". What a user has
// written is shown as it was written.
inline std::string number_text(double value) {
  return fmt::format("{:.6g}", without_nan_sign(value));
}

}  // namespace sbtrain
