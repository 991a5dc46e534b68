#include "parallel/element_sum.h"

#include <bit>
#include <cmath>

#include "core/error.h"

namespace sbtrain {
namespace {

float widen(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

uint16_t round_to_bf16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  // The largest NaN would round to zero.
  if (std::isnan(x)) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <typename T>
void add(void* y, const void* x, int64_t n) {
  auto* out = static_cast<T*>(y);
  const auto* in = static_cast<const T*>(x);
  for (int64_t i = 0; i < n; ++i) out[i] += in[i];
}

void add_bf16(void* y, const void* x, int64_t n) {
  auto* out = static_cast<uint16_t*>(y);
  const auto* in = static_cast<const uint16_t*>(x);
  for (int64_t i = 0; i < n; ++i) out[i] = round_to_bf16(widen(out[i]) + widen(in[i]));
}

}  // namespace

void add_elements(DType dtype, void* y, const void* x, int64_t n) {
  switch (dtype) {
    case DType::kF32:
      return add<float>(y, x, n);
    case DType::kBF16:
      return add_bf16(y, x, n);
    case DType::kF64:
      return add<double>(y, x, n);
    case DType::kI32:
      return add<uint32_t>(y, x, n);  // unsigned, so that overflow is defined
    case DType::kI64:
      return add<uint64_t>(y, x, n);
    case DType::kU8:
    case DType::kE4M3:
    case DType::kE5M2:
      break;
  }
  fail(ExitCode::kInternal, "sums of {} are not supported", dtype_name(dtype));
}

}  // namespace sbtrain
