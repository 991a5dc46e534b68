#include <bit>
#include <cstring>

#include "core/error.h"
#include "ops/cpu/cpu.h"
#include "ops/cpu/parallel.h"

namespace sbtrain::ops::cpu {
namespace {

float bf16_to_f32(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// Rounds to the nearest, ties to even; NaN stays NaN.
uint16_t f32_to_bf16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>(x == x ? rounded : (bits >> 16) | 0x40);
}

}  // namespace

void fill(Stream& /*s*/, Tensor x, float value) {
  const auto fill_with = [&](auto* data, auto element) {
    parallel_runs(x, data, x, data,
                  [=](auto* y, const auto* /*x*/, int64_t n) { std::fill(y, y + n, element); });
  };
  switch (x.dtype) {
    case DType::kF32:
      return fill_with(x.f32(), value);
    case DType::kBF16:
      return fill_with(x.bf16(), f32_to_bf16(value));
    case DType::kI32:
      return fill_with(x.i32(), static_cast<int32_t>(value));
    case DType::kF64:
      return fill_with(x.f64(), static_cast<double>(value));
    case DType::kI64:
    case DType::kU8:
      fail(ExitCode::kInternal, "fill: no kernel for {}", x.describe());
  }
}

void copy(Stream& /*s*/, Tensor y, Tensor x) {
  if (y.dtype == x.dtype) {
    const auto copy_runs = [&](auto* out_data) {
      const auto* in_data = static_cast<decltype(out_data)>(x.data);
      parallel_runs(y, out_data, x, in_data, [](auto* out, const auto* in, int64_t n) {
        std::memcpy(out, in, static_cast<size_t>(n) * sizeof(*out));
      });
    };
    if (dtype_size(y.dtype) == 2) return copy_runs(static_cast<uint16_t*>(y.data));
    if (dtype_size(y.dtype) == 8) return copy_runs(static_cast<uint64_t*>(y.data));
    return copy_runs(static_cast<uint32_t*>(y.data));
  }
  if (y.dtype == DType::kBF16 && x.dtype == DType::kF32) {
    parallel_runs(y, y.bf16(), x, x.f32(), [](uint16_t* out, const float* in, int64_t n) {
      for (int64_t i = 0; i < n; ++i) out[i] = f32_to_bf16(in[i]);
    });
  } else if (y.dtype == DType::kF32 && x.dtype == DType::kBF16) {
    parallel_runs(y, y.f32(), x, x.bf16(), [](float* out, const uint16_t* in, int64_t n) {
      for (int64_t i = 0; i < n; ++i) out[i] = bf16_to_f32(in[i]);
    });
  } else {
    fail(ExitCode::kInternal, "copy: no conversion from {} to {}", x.describe(), y.describe());
  }
}

void add(Stream& /*s*/, Tensor y, Tensor x) {
  parallel_runs(y, y.f32(), x, x.f32(), [](float* out, const float* in, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) out[i] += in[i];
  });
}

void copy_from_host(Stream& /*s*/, Tensor y, const void* host) {
  std::memcpy(y.data, host, y.bytes());
}

void copy_to_host(Stream& /*s*/, void* host, Tensor x) {
  std::memcpy(host, x.data, x.bytes());
}

void synchronize(Stream& /*s*/) {}  // ops are done when they return

}  // namespace sbtrain::ops::cpu
