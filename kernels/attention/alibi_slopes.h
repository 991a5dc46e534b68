// The slopes of ALiBi (arXiv 2108.12409).
#pragma once

#include <bit>
#include <cmath>

#include "kernels/attention/position_bias.h"

namespace sbtrain::kernels {

// m_h: 2^(-8h/P), h = 1..P, for P = 2^floor(log2 H) heads; the others take 2^(-8(2k-1)/(2P)),
// k = 1..H-P. `head` counts from 0.
inline float alibi_slope(int heads, int head) {
  const int power = static_cast<int>(std::bit_floor(static_cast<unsigned>(heads)));
  const double exponent =
      head < power ? 8.0 * (head + 1) / power : 8.0 * (2 * (head - power) + 1) / (2.0 * power);
  return static_cast<float>(std::exp2(-exponent));
}

// Of up to kMaxAlibiHeads heads.
inline AlibiSlopes alibi_slopes(int heads) {
  AlibiSlopes slopes{};
  for (int h = 0; h < heads; ++h) slopes.of_head[h] = alibi_slope(heads, h);
  return slopes;
}

}  // namespace sbtrain::kernels
