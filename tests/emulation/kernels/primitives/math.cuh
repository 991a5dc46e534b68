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

}  // namespace sbtrain::kernels
