#include "export/float_format.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "core/error.h"

namespace sbtrain {
namespace {

uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// A half has 10 bits of mantissa, exponents from -14, and below them numbers in steps of 2^-24.
uint16_t to_f16(float value) {
  const auto sign = static_cast<uint16_t>(std::signbit(value) ? 0x8000 : 0);
  if (std::isnan(value)) return sign | 0x7E00;
  const float size = std::fabs(value);
  if (size >= 65520.0f) return sign | 0x7C00;  // rounds to more than the largest number, 65504
  if (size < 0x1p-14f) {
    return sign | static_cast<uint16_t>(std::nearbyint(size * 0x1p24f));  // 1024 is 2^-14
  }
  const auto bits = std::bit_cast<uint32_t>(size);
  const uint32_t rounded = bits + 0xFFF + ((bits >> 13) & 1);
  return sign | static_cast<uint16_t>((rounded >> 13) - ((127 - 15) << 10));
}

float of_f16(uint16_t half) {
  const uint32_t exponent = (half >> 10) & 0x1F;
  const uint32_t mantissa = half & 0x3FF;
  float size = 0;
  if (exponent == 0) {
    size = static_cast<float>(mantissa) * 0x1p-24f;
  } else if (exponent == 0x1F) {
    size = std::bit_cast<float>(0x7F800000U | (mantissa << 13));
  } else {
    size = std::bit_cast<float>(((exponent + 127 - 15) << 23) | (mantissa << 13));
  }
  return (half & 0x8000) != 0 ? -size : size;
}

}  // namespace

bool is_weight_type(FileDType type) {
  return type == FileDType::kF32 || type == FileDType::kBF16 || type == FileDType::kF16;
}

size_t from_f32(FileDType type, const float* values, size_t count, void* out) {
  require(is_weight_type(type), "weights are not stored as {}", file_dtype_name(type));
  if (type == FileDType::kF32) {
    std::memcpy(out, values, count * sizeof(float));
    return 0;
  }
  auto* to = static_cast<uint16_t*>(out);
  const bool brain = type == FileDType::kBF16;
  const uint16_t infinite = brain ? 0x7F80 : 0x7C00;
  size_t overflows = 0;
  for (size_t i = 0; i < count; ++i) {
    to[i] = brain ? to_bf16(values[i]) : to_f16(values[i]);
    overflows += std::isfinite(values[i]) && (to[i] & 0x7FFF) == infinite ? 1 : 0;
  }
  return overflows;
}

void to_f32(FileDType type, const void* values, size_t count, float* out) {
  require(is_weight_type(type), "weights are not stored as {}", file_dtype_name(type));
  if (type == FileDType::kF32) {
    std::memcpy(out, values, count * sizeof(float));
    return;
  }
  const auto* from = static_cast<const uint16_t*>(values);
  for (size_t i = 0; i < count; ++i) {
    out[i] = type == FileDType::kBF16 ? std::bit_cast<float>(static_cast<uint32_t>(from[i]) << 16)
                                      : of_f16(from[i]);
  }
}

}  // namespace sbtrain
