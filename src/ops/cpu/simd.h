// Elementary functions in fp32 without branches or calls, for use under `#pragma omp simd`.
// Maximum errors against fp64 are tested over the whole range (tests/unit/ops/simd_test.cpp).
// NaN in gives NaN out.
#pragma once

#include <bit>
#include <cstdint>

namespace sbtrain::ops::cpu::simd {

// ln 2 in two parts: n * kLn2High is exact for |n| < 2^15, so reductions need no FMA.
inline constexpr float kLn2High = 0.693359375f;
inline constexpr float kLn2Low = -2.12194440e-4f;

inline float bits_to_float(int32_t bits) {
  return std::bit_cast<float>(bits);
}
inline int32_t float_to_bits(float x) {
  return std::bit_cast<int32_t>(x);
}

// e^x within 1.5 ulp, subnormal results included; 0 below -104, infinity above 88.73.
inline float exp(float x) {
  x = x < -104.0f ? -104.0f : x;
  x = x > 89.0f ? 89.0f : x;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float rounded = x * 1.44269504f + kRound;
  const float n = rounded - kRound;
  const float r = (x - n * kLn2High) - n * kLn2Low;
  // Minimax polynomial of (e^r - 1 - r) / r^2 on [-ln2/2, ln2/2] (Cephes expf).
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const float e = (p * (r * r) + r) + 1.0f;
  // 2^n in two factors, since n reaches from -150 to 128.
  const int32_t exponent = float_to_bits(rounded) - float_to_bits(kRound);
  const int32_t half = exponent >> 1;
  return e * bits_to_float((half + 127) << 23) * bits_to_float((exponent - half + 127) << 23);
}

// log(1 + u) for u in [0, 2^24], within 1.5 ulp.
inline float log1p(float u) {
  const float s = 1.0f + u;
  // What rounding took from s: exact for either order of magnitude (Knuth's two-sum).
  const float v = s - 1.0f;
  const float lost = (1.0f - (s - v)) + (u - v);
  // s = 2^e m with m in [sqrt(1/2), sqrt(2)).
  constexpr int32_t kSqrtHalf = 0x3f3504f3;
  const int32_t e = (float_to_bits(s) - kSqrtHalf) >> 23;
  const float inverse = bits_to_float((127 - e) << 23);
  const float f = (s * inverse - 1.0f) + lost * inverse;
  const auto n = static_cast<float>(e);
  // Minimax polynomial of (log(1 + f) - f + f^2/2) / f^3 (Cephes logf).
  float p = 7.0376836292e-2f;
  p = p * f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  const float f2 = f * f;
  return n * kLn2High + (f + ((p * f * f2 + n * kLn2Low) - 0.5f * f2));
}

inline float abs(float x) {
  return bits_to_float(float_to_bits(x) & 0x7fffffff);
}

// log(1 + e^x), within 2 ulp; x itself for large x.
inline float softplus(float x) {
  return (x > 0.0f ? x : 0.0f) + log1p(exp(-abs(x)));
}

// 1 / (1 + e^-x), within 2.5 ulp at both ends.
inline float sigmoid(float x) {
  const float e = exp(-abs(x));
  const float s = 1.0f / (1.0f + e);
  return x < 0.0f ? e * s : s;
}

// Sine and cosine of an angle in radians, |angle| < 2^20, each within 1.5e-7 absolute. The angle is
// fp64, since fp32 would leave errors of 4e-3 at position 65536.
inline void sincos(double angle, float& sine, float& cosine) {
  constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
  constexpr double kHalfPiHigh = 1.57079632673412561417;  // 33 bits: n * it is exact
  constexpr double kHalfPiLow = 6.07710050650619224932e-11;
  const double rounded = angle * 0.63661977236758134308 + kRound;
  const double n = rounded - kRound;
  const auto r = static_cast<float>((angle - n * kHalfPiHigh) - n * kHalfPiLow);
  const auto quadrant = static_cast<int32_t>(std::bit_cast<int64_t>(rounded));
  // Minimax polynomials on [-pi/4, pi/4] (Cephes sinf, cosf).
  const float r2 = r * r;
  float p = -1.9515295891e-4f;
  p = p * r2 + 8.3321608736e-3f;
  p = p * r2 - 1.6666654611e-1f;
  const float sin_r = p * r2 * r + r;
  float q = 2.443315711809948e-5f;
  q = q * r2 - 1.388731625493765e-3f;
  q = q * r2 + 4.166664568298827e-2f;
  const float cos_r = q * (r2 * r2) + (1.0f - 0.5f * r2);
  const bool swapped = (quadrant & 1) != 0;
  const float s = swapped ? cos_r : sin_r;
  const float c = swapped ? sin_r : cos_r;
  sine = bits_to_float(float_to_bits(s) ^ ((quadrant & 2) << 30));
  cosine = bits_to_float(float_to_bits(c) ^ (((quadrant + 1) & 2) << 30));
}

}  // namespace sbtrain::ops::cpu::simd
