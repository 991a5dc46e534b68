// Tensors for tests on the GPU.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <string>
#include <vector>

#include "core/fp8.h"
#include "ops/memory.h"
#include "support/gpu_test.h"
#include "support/tensors.h"

namespace sbtrain::test {

// A stream on the CUDA backend with memory of its own.
struct GpuStream {
  Memory memory{Backend::kCuda};
  Stream stream{memory};
  operator Stream&() { return stream; }  // NOLINT: passed to ops as a stream
};

inline uint16_t to_bf16(float x) {  // to nearest, ties to even
  const auto bits = std::bit_cast<uint32_t>(x);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline float from_bf16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// Rounds every element to the nearest bf16, so that both backends see the same inputs.
inline void round_to_bf16(Owned& x) {
  for (int64_t r = 0; r < x.tensor().rows(); ++r) {
    for (int64_t c = 0; c < x.tensor().cols(); ++c) x.at(r, c) = from_bf16(to_bf16(x.at(r, c)));
  }
}

// A tensor on the GPU, with `gap` elements after each row. It starts poisoned: all bits set, NaN
// in every real type.
class OnGpu {
 public:
  OnGpu(GpuStream& gpu, DType dtype, std::vector<int64_t> shape, int64_t gap = 0) : gpu_(gpu) {
    Tensor view(nullptr, dtype, shape);
    const int64_t rows = view.rows();
    view.row_stride = view.cols() + gap;
    all_ = gpu.memory.allocate(MemoryClass::kActivations, "test", dtype, {rows, view.row_stride});
    const std::vector<uint8_t> poison(all_.tensor().bytes(), 0xff);
    ops::run(gpu, ops::CopyFromHost{.y = all_, .host = poison.data()});
    view.data = all_.tensor().data;
    view_ = view;
  }
  // Copies the elements of a host tensor, f32 or i32, converted to `dtype`.
  OnGpu(GpuStream& gpu, const Tensor& host, DType dtype, int64_t gap = 0)
      : OnGpu(gpu, dtype, std::vector<int64_t>(host.shape.begin(), host.shape.begin() + host.rank),
              gap) {
    std::vector<uint8_t> bytes = raw();
    const std::vector<double> values = to_f64(host);
    for (int64_t r = 0; r < view_.rows(); ++r) {
      for (int64_t c = 0; c < view_.cols(); ++c) {
        const auto value = static_cast<float>(values[static_cast<size_t>(r * view_.cols() + c)]);
        uint8_t* to = bytes.data() + (r * view_.row_stride + c) * dtype_size(dtype);
        const auto integer = static_cast<int32_t>(value);
        const uint16_t half = to_bf16(value);
        if (dtype == DType::kF32) std::memcpy(to, &value, sizeof(value));
        if (dtype == DType::kI32) std::memcpy(to, &integer, sizeof(integer));
        if (dtype == DType::kBF16) std::memcpy(to, &half, sizeof(half));
      }
    }
    ops::run(gpu, ops::CopyFromHost{.y = all_, .host = bytes.data()});
  }

  operator const Tensor&() const { return view_; }  // NOLINT: used as its tensor
  const Tensor& tensor() const { return view_; }
  // All bytes, including the gaps.
  std::vector<uint8_t> raw() const {
    std::vector<uint8_t> bytes(all_.tensor().bytes());
    ops::run(gpu_, ops::CopyToHost{.host = bytes.data(), .x = all_});
    return bytes;
  }
  std::vector<double> values() const {
    const std::vector<uint8_t> bytes = raw();
    std::vector<double> out;
    for (int64_t r = 0; r < view_.rows(); ++r) {
      for (int64_t c = 0; c < view_.cols(); ++c) {
        const uint8_t* from = bytes.data() + (r * view_.row_stride + c) * dtype_size(view_.dtype);
        out.push_back(read(from));
      }
    }
    return out;
  }
  bool gaps_intact() const {
    const std::vector<uint8_t> bytes = raw();
    const size_t size = dtype_size(view_.dtype);
    for (int64_t r = 0; r < view_.rows(); ++r) {
      for (size_t i = static_cast<size_t>(r * view_.row_stride + view_.cols()) * size;
           i < static_cast<size_t>((r + 1) * view_.row_stride) * size; ++i) {
        if (bytes[i] != 0xff) return false;
      }
    }
    return true;
  }

 private:
  double read(const uint8_t* from) const {
    switch (view_.dtype) {
      case DType::kF32:
        return read_as<float>(from);
      case DType::kBF16:
        return from_bf16(read_as<uint16_t>(from));
      case DType::kI32:
        return read_as<int32_t>(from);
      case DType::kF64:
        return read_as<double>(from);
      case DType::kI64:
        return static_cast<double>(read_as<int64_t>(from));
      case DType::kU8:
        return *from;
      case DType::kE4M3:
      case DType::kE5M2:
        return static_cast<double>(fp8_to_f32(*from, view_.dtype));
    }
    return 0;
  }
  template <typename T>
  static T read_as(const uint8_t* from) {
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
  }

  GpuStream& gpu_;
  Buffer all_;
  Tensor view_;
};

}  // namespace sbtrain::test
