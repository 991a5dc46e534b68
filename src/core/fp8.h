// The two fp8 formats of arXiv 2209.05433, rounded on the host bit for bit as GPUs round to them.
//
// e4m3: 4 bits of exponent with bias 7, 3 of mantissa; the largest number is 448, there is no
// infinity, and only the pattern with all bits set is NaN. e5m2: 5 bits with bias 15, 2 of
// mantissa, laid out as IEEE 754 has it; the largest number is 57344. Both have subnormal numbers.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "core/tensor.h"

namespace sbtrain {

// Tensor cores take matrices in fp8 whose rows begin at multiples of 16 bytes, with as many inner
// elements.
inline constexpr int64_t kFp8Multiple = 16;

// cuBLASLt refuses products whose scales do not begin at multiples of 16 bytes: an array of scales
// has so many elements for each.
inline constexpr int64_t kFp8ScaleStride = 4;

struct Fp8Format {
  int mantissa_bits;
  int bias;
  uint8_t largest;  // pattern of the largest finite number
  uint8_t nan;
};
constexpr Fp8Format fp8_format(DType dtype) {
  return dtype == DType::kE4M3 ? Fp8Format{3, 7, 0x7e, 0x7f} : Fp8Format{2, 15, 0x7b, 0x7f};
}

// The largest finite number, 448 or 57344.
constexpr float fp8_max(DType dtype) {
  return dtype == DType::kE4M3 ? 448.0f : 57344.0f;
}

inline float fp8_to_f32(uint8_t bits, DType dtype) {
  const Fp8Format format = fp8_format(dtype);
  const int magnitude = bits & 0x7f;
  const float sign = (bits & 0x80) != 0 ? -1.0f : 1.0f;
  if (magnitude > format.largest) {
    const bool infinite = dtype == DType::kE5M2 && magnitude == 0x7c;
    return infinite ? sign * HUGE_VALF : NAN;
  }
  const int exponent = magnitude >> format.mantissa_bits;
  const int mantissa = magnitude & ((1 << format.mantissa_bits) - 1);
  const int whole = exponent == 0 ? mantissa : mantissa | (1 << format.mantissa_bits);
  const int power = (exponent == 0 ? 1 : exponent) - format.bias - format.mantissa_bits;
  return sign * std::ldexp(static_cast<float>(whole), power);
}

// Rounds to nearest, ties to even. What is too large, infinities too, becomes the largest finite
// number of its sign; NaN stays NaN, without a sign.
inline uint8_t f32_to_fp8(float x, DType dtype) {
  const Fp8Format format = fp8_format(dtype);
  if (x != x) return format.nan;
  const auto bits = std::bit_cast<uint32_t>(x);
  const auto sign = static_cast<uint8_t>((bits >> 24) & 0x80);
  const float size = std::bit_cast<float>(bits & 0x7fffffffu);
  if (size >= fp8_max(dtype)) return static_cast<uint8_t>(sign | format.largest);
  // Adding and taking away this power of two leaves a multiple of the spacing of the format's
  // numbers around x, rounded as f32 rounds: to nearest, ties to even.
  const int exponent = static_cast<int>((bits >> 23) & 0xff) - 127;
  const int lowest = 1 - format.bias;
  const int place = (exponent < lowest ? lowest : exponent) - format.mantissa_bits;
  const auto shift = std::bit_cast<float>(static_cast<uint32_t>(place + 23 + 127) << 23);
  const float rounded = (size + shift) - shift;
  const auto steps = static_cast<int>(rounded * std::ldexp(1.0f, -place));
  const int base = (exponent < lowest ? 0 : exponent - lowest) << format.mantissa_bits;
  // A mantissa that overflows carries into the exponent, as it should.
  return static_cast<uint8_t>(sign | (base + steps));
}

// The factor by which numbers of at most `amax` are multiplied before they are rounded to fp8. An
// amax of 0 has the factor 1, and one so small that its factor would overflow has 2^126. NaN and
// infinity make every product NaN, which the guard of the step finds.
inline float fp8_scale(float amax, DType dtype) {
  constexpr float kLargest = 0x1p126f;
  if (amax == 0.0f) return 1.0f;
  const float scale = fp8_max(dtype) / amax;
  return scale > kLargest ? kLargest : scale;
}

}  // namespace sbtrain
