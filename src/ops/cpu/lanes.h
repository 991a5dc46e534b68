// As many floats as one vector register of the processor that is compiled for holds, for loops
// whose sums must stay in registers and be added in one order.
#pragma once

#include <cstring>

namespace sbtrain::ops::cpu {

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#elif defined(__AVX__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif
using Lanes = float __attribute__((vector_size(kLanes * sizeof(float))));

inline Lanes load_lanes(const float* x) {
  Lanes lanes;
  std::memcpy(&lanes, x, sizeof(lanes));
  return lanes;
}

inline void store_lanes(float* y, const Lanes& lanes) {
  std::memcpy(y, &lanes, sizeof(lanes));
}

}  // namespace sbtrain::ops::cpu
