// Tensors on the GPU for tests, next to those of support/tensors.h on the host.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <memory>

#include "core/device.h"
#include "ops/ops.h"
#include "support/tensors.h"

namespace sbtrain::test {

// Bounds of relative_error() against the CPU backend or fp64 on the same, bf16-rounded inputs.
inline constexpr double kBf16Error = 4e-3;
inline constexpr double kF32Error = 1e-5;

struct CudaStream {
  Memory memory{Backend::kCuda};
  Stream stream{memory};
  operator Stream&() { return stream; }  // NOLINT: passed where ops want a stream
};

// Skips where there is no GPU. Ops run on `gpu` or `cpu`.
class GpuTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    if (!cuda_available(&why)) GTEST_SKIP() << why;
    stream_ = std::make_unique<CudaStream>();
  }
  CudaStream& gpu() { return *stream_; }
  CpuStream cpu;

 private:
  std::unique_ptr<CudaStream> stream_;
};

inline uint16_t to_bf16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>(x == x ? rounded : (bits >> 16) | 0x40);
}
inline float from_bf16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// Normal numbers that bf16 can hold.
inline Owned random_bf16(std::string_view name, std::vector<int64_t> shape, double std = 1.0,
                         double mean = 0.0) {
  Owned x = random_normal(name, std::move(shape), std, mean);
  for (int64_t i = 0; i < x.tensor().numel(); ++i) x.f32()[i] = from_bf16(to_bf16(x.f32()[i]));
  return x;
}

// A tensor on the GPU. With `gap` > 0 its rows are strided: `gap` elements that no op may touch lie
// behind each row. Everything starts poisoned, with NaN where the type has it.
class OnGpu {
 public:
  OnGpu(CudaStream& s, DType dtype, std::vector<int64_t> shape, int64_t gap = 0)
      : stream_(s), size_(dtype_size(dtype)) {
    view_ = Tensor(nullptr, dtype, shape);
    view_.row_stride = view_.cols() + gap;
    count_ = view_.rows() * view_.row_stride;
    buffer_ = s.memory.allocate(MemoryClass::kActivations, "test", dtype, {count_});
    view_.data = buffer_.tensor().data;
    upload(std::vector<uint8_t>(static_cast<size_t>(count_) * size_, kPoison));
  }
  // Holds the values of `x`, f32 or i32 on the host, as `dtype`.
  OnGpu(CudaStream& s, DType dtype, const Owned& x, int64_t gap = 0)
      : OnGpu(s, dtype, shape_of(x), gap) {
    std::vector<uint8_t> bytes = download();
    const Tensor& host = x.tensor();
    for (int64_t r = 0; r < host.rows(); ++r) {
      for (int64_t c = 0; c < host.cols(); ++c) {
        const int64_t from = r * host.row_stride + c;
        uint8_t* to = bytes.data() + static_cast<size_t>(r * view_.row_stride + c) * size_;
        if (dtype == DType::kBF16) {
          const uint16_t bits = to_bf16(host.f32()[from]);
          std::memcpy(to, &bits, size_);
        } else {
          std::memcpy(to, static_cast<const uint32_t*>(host.data) + from, size_);
        }
      }
    }
    upload(bytes);
  }
  OnGpu(const OnGpu&) = delete;
  OnGpu& operator=(const OnGpu&) = delete;

  operator const Tensor&() const { return view_; }  // NOLINT: used as its tensor
  const Tensor& tensor() const { return view_; }

  // All elements, row by row.
  std::vector<double> values() const {
    const std::vector<uint8_t> bytes = download();
    std::vector<double> out;
    for (int64_t r = 0; r < view_.rows(); ++r) {
      for (int64_t c = 0; c < view_.cols(); ++c) {
        out.push_back(value(bytes.data() + static_cast<size_t>(r * view_.row_stride + c) * size_));
      }
    }
    return out;
  }
  // What lies in memory, gaps included: for comparing runs bit by bit.
  std::vector<uint8_t> bytes() const { return download(); }
  bool gaps_intact() const {
    const std::vector<uint8_t> bytes = download();
    for (int64_t r = 0; r < view_.rows(); ++r) {
      for (size_t i = static_cast<size_t>(r * view_.row_stride + view_.cols()) * size_;
           i < static_cast<size_t>((r + 1) * view_.row_stride) * size_; ++i) {
        if (bytes[i] != kPoison) return false;
      }
    }
    return true;
  }

 private:
  static constexpr uint8_t kPoison = 0xff;  // NaN in f32, bf16 and f64; -1 in i32

  static std::vector<int64_t> shape_of(const Owned& x) {
    const Tensor& t = x.tensor();
    return {t.shape.begin(), t.shape.begin() + t.rank};
  }
  double value(const uint8_t* data) const {
    const auto as = [&](auto typed) {
      std::memcpy(&typed, data, sizeof(typed));
      return typed;
    };
    switch (view_.dtype) {
      case DType::kF32:
        return static_cast<double>(as(float{}));
      case DType::kBF16:
        return static_cast<double>(from_bf16(as(uint16_t{})));
      case DType::kI32:
        return as(int32_t{});
      case DType::kF64:
        return as(double{});
    }
    return 0;
  }
  void upload(const std::vector<uint8_t>& bytes) {
    ops::copy_from_host(stream_, buffer_, bytes.data());
  }
  std::vector<uint8_t> download() const {
    std::vector<uint8_t> bytes(static_cast<size_t>(count_) * size_);
    ops::copy_to_host(stream_, bytes.data(), buffer_);
    return bytes;
  }

  CudaStream& stream_;
  size_t size_;
  int64_t count_ = 0;
  Buffer buffer_;
  Tensor view_;
};

inline double relative_error(const OnGpu& actual, const std::vector<double>& reference) {
  return relative_error(actual.values(), reference);
}
inline double relative_error(const OnGpu& actual, const Tensor& reference) {
  return relative_error(actual.values(), to_f64(reference));
}

}  // namespace sbtrain::test
