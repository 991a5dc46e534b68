// Replaces products of one warp (emulation/emulator.h), as far as emulated kernels call them.
#pragma once

#include <cstdint>

#include "emulation/emulator.h"

namespace sbtrain::kernels {

// The lanes' parts of the matrices are those of the true header.
inline void mma_m16n8k16_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const int lane = emulation::lane_index();
  const auto both = [](uint32_t low, uint32_t high) { return uint64_t{high} << 32 | low; };
  const auto& [first, second, columns] =
      emulation::exchange(both(a[0], a[1]), both(a[2], a[3]), both(b0, b1));
  const auto value = [](uint64_t pairs, int i) {  // 0 to 3
    return emulation::bits_as<float>(static_cast<uint32_t>(pairs >> 16 * i & 0xffff) << 16);
  };
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4;
    const int column = 2 * (lane % 4) + i % 2;
    for (int q = 0; q < 4; ++q) {
      for (int at = 0; at < 2; ++at) {
        const int of_a = i / 2 * 2 + at;  // the low half is row g, the high half row g + 8
        c[i] += value(first[4 * row + q], of_a) * value(columns[4 * column + q], at);
        c[i] += value(second[4 * row + q], of_a) * value(columns[4 * column + q], 2 + at);
      }
    }
  }
}

inline void mma_m16n8k8_bf16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  mma_m16n8k16_bf16(c, {a0, a1, 0, 0}, b, 0);
}

// Two floats, rounded to bf16, the first in the low half.
inline uint32_t pack_bf16(float low, float high) {
  return emulation::bits_as<uint32_t>(__floats2bfloat162_rn(low, high));
}

// The sums of two pairs of bf16, rounded.
inline uint32_t add_bf16(uint32_t x, uint32_t y) {
  const auto value = [](uint32_t bits) { return emulation::bits_as<float>(bits); };
  return pack_bf16(value(x << 16) + value(y << 16), value(x & 0xffff0000) + value(y & 0xffff0000));
}

// The A [16, 16] of two C [16, 8] side by side, rounded to bf16.
inline void accumulator_as_a(uint32_t (&a)[4], const float (&left)[4], const float (&right)[4]) {
  a[0] = pack_bf16(left[0], left[1]);
  a[1] = pack_bf16(left[2], left[3]);
  a[2] = pack_bf16(right[0], right[1]);
  a[3] = pack_bf16(right[2], right[3]);
}

}  // namespace sbtrain::kernels
