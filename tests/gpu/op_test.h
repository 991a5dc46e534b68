// Shared by the tests of single ops on the GPU: both backends run on inputs that bf16 can hold.
#pragma once

#include <memory>

#include "support/gpu.h"

namespace sbtrain::test {

// Bounds of relative_error() for outputs of either type, against the CPU backend or fp64.
inline constexpr double kBf16Error = 4e-3;
inline constexpr double kF32Error = 1e-5;

// Matrices whose rows have every width that kernels treat differently, with `gap` elements between.
struct RowCase {
  int64_t tokens, width, gap;
};
inline constexpr RowCase kRowCases[] = {
    {1, 1, 0},     {5, 3, 1},     {67, 17, 2},    {300, 128, 0},  {300, 128, 3},
    {700, 512, 8}, {65, 768, 0},  {700, 1031, 0}, {900, 1536, 0}, {70, 1536, 16},
    {33, 2048, 0}, {40, 4104, 8}, {9, 16384, 0},  {3, 16383, 0}};

class GpuOpTest : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (!IsSkipped()) stream_ = std::make_unique<GpuStream>();
  }
  GpuStream& gpu() { return *stream_; }
  CpuStream cpu;

 private:
  std::unique_ptr<GpuStream> stream_;
};

inline Owned random_bf16(std::string_view name, std::vector<int64_t> shape, double std = 1.0,
                         double mean = 0.0) {
  Owned x = random_normal(name, std::move(shape), std, mean);
  round_to_bf16(x);
  return x;
}

inline double relative_error(const OnGpu& actual, const std::vector<double>& reference) {
  return relative_error(actual.values(), reference);
}
inline double relative_error(const OnGpu& actual, const Tensor& reference) {
  return relative_error(actual.values(), to_f64(reference));
}

}  // namespace sbtrain::test
