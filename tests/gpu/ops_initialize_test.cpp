// Initial values have the same bits on the GPU as on the CPU.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "gpu/op_test.h"
#include "ops/initialize.h"

namespace sbtrain::initialize_test {
namespace {

using test::OnGpu;
using test::Owned;
using InitializeGpu = test::GpuOpTest;

template <typename T>
std::vector<T> bits(const OnGpu& x) {
  const std::vector<uint8_t> raw = x.raw();
  std::vector<T> out(raw.size() / sizeof(T));
  std::memcpy(out.data(), raw.data(), raw.size());
  return out;
}

std::vector<uint32_t> bits(const Owned& x) {
  std::vector<uint32_t> out(static_cast<size_t>(x.tensor().numel()));
  std::memcpy(out.data(), x.f32(), x.tensor().bytes());
  return out;
}

ops::Initialize draw(const Tensor& x, int64_t begin, int64_t rows, int64_t cols, int64_t stored) {
  return {.x_N = x,
          .begin = begin,
          .rows = rows,
          .cols = cols,
          .stored_cols = stored,
          .init = Init::normal(0.02),
          .random = Philox(11, RandomPurpose::kInit, "model.layers.3.mlp.gate_proj.weight")};
}

// 2^26 numbers from places all over the range of element indices, the first ones included.
TEST_F(InitializeGpu, NormalNumbersHaveTheBitsOfTheHost) {
  constexpr int64_t kCount = int64_t{1} << 24;
  constexpr int64_t kCols = int64_t{1} << 45;
  for (const int64_t begin :
       {int64_t{0}, int64_t{1} << 24, (int64_t{1} << 32) - 1000, (int64_t{1} << 44) + 3}) {
    const Owned host(DType::kF32, {kCount});
    const OnGpu device(gpu(), DType::kF32, {kCount});
    ops::run(cpu, draw(host, begin, 1, kCols, kCols));
    ops::run(gpu(), draw(device, begin, 1, kCols, kCols));
    EXPECT_TRUE(bits<uint32_t>(device) == bits(host)) << begin;
  }
}

TEST_F(InitializeGpu, PaddingIsZeroAndRangesAreCuts) {
  for (const int64_t begin : {0, 1, 129, 1000, 36'000}) {
    constexpr int64_t kStored = 136;
    const int64_t count = 300 * kStored - begin;
    const Owned host(DType::kF32, {count});
    const OnGpu device(gpu(), DType::kF32, {count});
    ops::run(cpu, draw(host, begin, 270, 129, kStored));
    ops::run(gpu(), draw(device, begin, 270, 129, kStored));
    EXPECT_TRUE(bits<uint32_t>(device) == bits(host)) << begin;
  }
}

TEST_F(InitializeGpu, Bf16IsTheRoundedValue) {
  const Owned host(DType::kF32, {5000});
  const OnGpu device(gpu(), DType::kBF16, {5000});
  ops::run(cpu, draw(host, 70, 50, 120, 128));
  ops::run(gpu(), draw(device, 70, 50, 120, 128));
  const std::vector<uint16_t> actual = bits<uint16_t>(device);
  for (size_t i = 0; i < actual.size(); ++i) ASSERT_EQ(actual[i], test::to_bf16(host.f32()[i]));
}

TEST_F(InitializeGpu, ConstantsFillLogicalElements) {
  const Owned host(DType::kF32, {64});
  const OnGpu device(gpu(), DType::kF32, {64});
  for (const Tensor& x : {host.tensor(), device.tensor()}) {
    ops::Initialize op = draw(x, 0, 5, 1, 1);
    op.init = Init::constant(1.5);
    if (x.data == host.tensor().data) {
      ops::run(cpu, op);
    } else {
      ops::run(gpu(), op);
    }
  }
  EXPECT_EQ(bits<uint32_t>(device), bits(host));
}

}  // namespace
}  // namespace sbtrain::initialize_test
