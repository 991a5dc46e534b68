#include <gtest/gtest.h>

#include <cmath>

#include "core/error.h"
#include "gpu/op_test.h"
#include "ops/memory.h"

namespace sbtrain::memory_test {
namespace {

using test::OnGpu;
using test::Owned;
using Memory = test::GpuOpTest;
using Values = std::vector<double>;

constexpr DType kF32 = DType::kF32;
constexpr DType kBF16 = DType::kBF16;

struct Shape {
  int64_t rows, cols, y_gap, x_gap;
};
// Contiguous and strided rows, some of which allow vectorised copies.
constexpr Shape kShapes[] = {{1, 1, 0, 0},   {7, 13, 0, 0},     {7, 13, 2, 5}, {300, 257, 0, 3},
                             {64, 72, 0, 0}, {300, 256, 8, 16}, {5, 8, 1, 0},  {2, 100000, 0, 0}};

TEST_F(Memory, FillsEveryTypeAndStride) {
  for (const Shape& shape : kShapes) {
    const Values expected(static_cast<size_t>(shape.rows * shape.cols), -2.0);
    for (const DType dtype : {kF32, kBF16, DType::kI32, DType::kF64}) {
      const OnGpu x(gpu(), dtype, {shape.rows, shape.cols}, shape.y_gap);
      ops::run(gpu(), ops::Fill{.x = x, .value = -2.0f});
      EXPECT_EQ(x.values(), expected);
      EXPECT_TRUE(x.gaps_intact());
    }
  }
}

TEST_F(Memory, CopiesBetweenTypes) {
  for (const Shape& shape : kShapes) {
    const Owned values = test::random_bf16("x", {shape.rows, shape.cols});
    for (const DType from : {kF32, kBF16}) {
      for (const DType to : {kF32, kBF16}) {
        const OnGpu x(gpu(), values, from, shape.x_gap);
        const OnGpu y(gpu(), to, {shape.rows, shape.cols}, shape.y_gap);
        ops::run(gpu(), ops::Copy{.y = y, .x = x});
        EXPECT_EQ(y.values(), test::to_f64(values));
        EXPECT_TRUE(y.gaps_intact());
      }
    }
  }
  const Owned ids = test::random_integers("ids", 1000, 1 << 24);
  const OnGpu x(gpu(), ids, DType::kI32);
  const OnGpu y(gpu(), DType::kI32, {1000});
  ops::run(gpu(), ops::Copy{.y = y, .x = x});
  EXPECT_EQ(y.values(), test::to_f64(ids));
  EXPECT_THROW(ops::run(gpu(), ops::Copy{.y = OnGpu(gpu(), kF32, {1000}), .x = x}), Error);
}

// Column ranges that do not begin on a boundary of 16 bytes.
TEST_F(Memory, CopiesColumnRanges) {
  const Owned values = test::random_bf16("x", {33, 80});
  const OnGpu x(gpu(), values, kBF16);
  for (const int64_t first : {0, 1, 4, 8}) {
    const OnGpu y(gpu(), kF32, {33, 64}, 4);
    ops::run(gpu(), ops::Copy{.y = y, .x = x.tensor().col_range(first, 64)});
    EXPECT_EQ(y.values(), test::to_f64(values.tensor().col_range(first, 64)));
    EXPECT_TRUE(y.gaps_intact());
  }
}

TEST_F(Memory, RoundsToNearestEven) {
  const std::vector<float> input = {1.0f,  0x1.01p0f,       0x1.03p0f, 0x1.010002p0f, -0x1.01p0f,
                                    3e38f, 0x1.fffffep127f, 1e-40f,    -0.0f,         -INFINITY};
  const Values expected = {1.0,        1.0,      0x1.04p0, 0x1.02p0, -1.0,
                           0x1.c4p127, INFINITY, 0x1p-133, -0.0,     -INFINITY};
  const Owned host =
      test::generated({10}, 0, [&](int64_t i) { return input[static_cast<size_t>(i)]; });
  const OnGpu x(gpu(), host, kF32);
  const OnGpu y(gpu(), kBF16, {10});
  ops::run(gpu(), ops::Copy{.y = y, .x = x});
  EXPECT_EQ(y.values(), expected);
  const OnGpu nan(gpu(), test::constant({1}, std::nan("")), kF32);
  const OnGpu rounded(gpu(), test::constant({1}, 0), kBF16);
  ops::run(gpu(), ops::Copy{.y = rounded, .x = nan});
  EXPECT_TRUE(std::isnan(rounded.values()[0]));
}

TEST_F(Memory, AddsInPlace) {
  for (const Shape& shape : kShapes) {
    const Owned a = test::random_bf16("a", {shape.rows, shape.cols});
    const Owned b = test::random_bf16("b", {shape.rows, shape.cols});
    Values expected = test::to_f64(a);
    const Values other = test::to_f64(b);
    for (size_t i = 0; i < expected.size(); ++i) expected[i] += other[i];
    for (const DType from : {kF32, kBF16}) {
      for (const DType to : {kF32, kBF16}) {
        const OnGpu y(gpu(), a, to, shape.y_gap);
        ops::run(gpu(), ops::Add{.y = y, .x = OnGpu(gpu(), b, from, shape.x_gap)});
        EXPECT_LE(test::relative_error(y, expected), to == kF32 ? 1e-7 : test::kBf16Error);
        EXPECT_TRUE(y.gaps_intact());
      }
    }
  }
}

TEST_F(Memory, SumsParts) {
  for (const Shape& shape : kShapes) {
    const Owned x = test::random_bf16("x", {shape.rows, shape.cols});
    const Owned mine = test::random_bf16("mine", {shape.cols});
    const Owned y = test::random_bf16("y", {shape.cols});
    const int64_t own = shape.rows / 2;
    for (const bool add : {false, true}) {
      const Values terms = test::to_f64(x);
      const Values own_terms = test::to_f64(mine);
      Values expected = add ? test::to_f64(y) : Values(own_terms.size(), 0.0);
      for (size_t i = 0; i < terms.size(); ++i) {
        const size_t col = i % own_terms.size();
        const bool here = static_cast<int64_t>(i / own_terms.size()) == own;
        expected[col] += here ? own_terms[col] : terms[i];
      }
      for (const DType from : {kF32, kBF16}) {
        const OnGpu out(gpu(), y, kF32);
        ops::run(gpu(), ops::SumParts{.y_N = out,
                                      .x_RN = OnGpu(gpu(), x, from, shape.x_gap),
                                      .own_N = OnGpu(gpu(), mine, from),
                                      .own = own,
                                      .add = add});
        EXPECT_LE(test::relative_error(out, expected), 1e-6);
      }
    }
  }
}

}  // namespace
}  // namespace sbtrain::memory_test
