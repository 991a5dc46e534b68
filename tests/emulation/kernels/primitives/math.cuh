// Replaces the special function unit (emulation/emulator.h). The results are more exact than its
// own.
#pragma once

#include <cmath>

namespace sbtrain::kernels {

inline constexpr float kLog2e = 1.4426950408889634f;

inline float exp2_ftz(float x) {
  return std::exp2(x);
}
inline float log2_ftz(float x) {
  return std::log2(x);
}
inline float reciprocal_ftz(float x) {
  return 1.0f / x;
}
inline float min_or_nan(float a, float b) {
  return a < b || std::isnan(a) ? a : b;
}

}  // namespace sbtrain::kernels
