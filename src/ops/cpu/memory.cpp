#include "ops/memory.h"

#include <bit>
#include <cstring>

#include "core/error.h"
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

void run(Cpu, Stream& /*s*/, const Fill& op) {
  const auto fill_with = [&](auto* data, auto element) {
    parallel_runs(op.x, data, op.x, data,
                  [=](auto* y, const auto* /*x*/, int64_t n) { std::fill(y, y + n, element); });
  };
  switch (op.x.dtype) {
    case DType::kF32:
      return fill_with(op.x.f32(), op.value);
    case DType::kBF16:
      return fill_with(op.x.bf16(), f32_to_bf16(op.value));
    case DType::kI32:
      return fill_with(op.x.i32(), static_cast<int32_t>(op.value));
    case DType::kF64:
      return fill_with(op.x.f64(), static_cast<double>(op.value));
    case DType::kI64:
    case DType::kU8:
    case DType::kE4M3:
    case DType::kE5M2:
      fail(ExitCode::kInternal, "fill: no kernel for {}", op.x.describe());
  }
}

void run(Cpu, Stream& /*s*/, const Copy& op) {
  if (op.y.dtype == op.x.dtype) {
    const auto copy_runs = [&](auto* out_data) {
      const auto* in_data = static_cast<decltype(out_data)>(op.x.data);
      parallel_runs(op.y, out_data, op.x, in_data, [](auto* out, const auto* in, int64_t n) {
        std::memcpy(out, in, static_cast<size_t>(n) * sizeof(*out));
      });
    };
    if (dtype_size(op.y.dtype) == 1) return copy_runs(static_cast<uint8_t*>(op.y.data));
    if (dtype_size(op.y.dtype) == 2) return copy_runs(static_cast<uint16_t*>(op.y.data));
    if (dtype_size(op.y.dtype) == 8) return copy_runs(static_cast<uint64_t*>(op.y.data));
    return copy_runs(static_cast<uint32_t*>(op.y.data));
  }
  if (op.y.dtype == DType::kBF16 && op.x.dtype == DType::kF32) {
    parallel_runs(op.y, op.y.bf16(), op.x, op.x.f32(),
                  [](uint16_t* out, const float* in, int64_t n) {
                    for (int64_t i = 0; i < n; ++i) out[i] = f32_to_bf16(in[i]);
                  });
  } else if (op.y.dtype == DType::kF32 && op.x.dtype == DType::kBF16) {
    parallel_runs(op.y, op.y.f32(), op.x, op.x.bf16(),
                  [](float* out, const uint16_t* in, int64_t n) {
                    for (int64_t i = 0; i < n; ++i) out[i] = bf16_to_f32(in[i]);
                  });
  } else {
    fail(ExitCode::kInternal, "copy: no conversion from {} to {}", op.x.describe(),
         op.y.describe());
  }
}

void run(Cpu, Stream& /*s*/, const Add& op) {
  parallel_runs(op.y, op.y.f32(), op.x, op.x.f32(), [](float* out, const float* in, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) out[i] += in[i];
  });
}

void run(Cpu, Stream& /*s*/, const SumParts& op) {
  const auto sum_parts = [&](const auto* x, const auto* own, auto widen) {
    parallel_rows(op.x_RN.cols(), op.x_RN.rows(), [&](int64_t begin, int64_t end) {
      float* y = op.y_N.f32();
      const auto part = [&](int64_t r) { return r == op.own ? own : x + r * op.x_RN.row_stride; };
      for (int64_t i = begin; i < end; ++i) {
        float sum = widen(part(0)[i]);
        for (int64_t r = 1; r < op.x_RN.rows(); ++r) sum += widen(part(r)[i]);
        y[i] = op.add ? y[i] + sum : sum;
      }
    });
  };
  if (op.x_RN.dtype == DType::kF32) {
    return sum_parts(op.x_RN.f32(), op.own_N.f32(), [](float x) { return x; });
  }
  if (op.x_RN.dtype == DType::kBF16) {
    return sum_parts(op.x_RN.bf16(), op.own_N.bf16(), bf16_to_f32);
  }
  fail(ExitCode::kInternal, "sum_parts: no kernel for {}", op.x_RN.describe());
}

void run(Cpu, Stream& /*s*/, const CopyFromHost& op) {
  if (op.y.bytes() > 0) std::memcpy(op.y.data, op.host, op.y.bytes());
}

void run(Cpu, Stream& /*s*/, const FetchFromHost& op) {
  if (op.y.bytes() > 0) std::memcpy(op.y.data, op.host, op.y.bytes());
}

void run(Cpu, Stream& /*s*/, const CopyToHost& op) {
  if (op.x.bytes() > 0) std::memcpy(op.host, op.x.data, op.x.bytes());
}

void run(Cpu, Stream& /*s*/, const Synchronize& /*op*/) {}  // ops are done when they return

void run(Cpu, Stream& /*s*/, const StartCopyToHost& op) {
  auto* to = static_cast<std::byte*>(op.host);
  const auto* from = static_cast<const std::byte*>(op.x.data);
  const auto size = static_cast<int64_t>(dtype_size(op.x.dtype));
  parallel_rows(op.x.numel(), 1, [&](int64_t begin, int64_t end) {
    std::memcpy(to + begin * size, from + begin * size, static_cast<size_t>((end - begin) * size));
  });
}

}  // namespace sbtrain::ops::cpu
