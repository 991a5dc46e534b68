#include "ops/memory.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/error.h"
#include "ops/linear.h"
#include "ops/norm.h"
#include "support/tensors.h"

namespace sbtrain {
namespace {

using test::CpuStream;
using test::Owned;

constexpr int64_t kSmall[] = {7, 13};
constexpr int64_t kLarge[] = {300, 257};  // enough for several threads

TEST(Fill, EveryDtypeAndStride) {
  CpuStream s;
  for (const int64_t gap : {0, 3}) {
    Owned x = test::poisoned({300, 257}, gap);
    ops::run(s, ops::Fill{.x = x, .value = 2.5f});
    EXPECT_EQ(test::to_f64(x), std::vector<double>(300 * 257, 2.5));
    EXPECT_TRUE(x.gaps_intact());
  }
  const Owned i(DType::kI32, {9});
  ops::run(s, ops::Fill{.x = i, .value = -1.0f});
  EXPECT_EQ(test::to_f64(i), std::vector<double>(9, -1));
}

TEST(SumParts, AddsRowsInTheirOrder) {
  CpuStream s;
  for (const auto* shape : {kSmall, kLarge}) {
    for (const int64_t own : {int64_t{0}, int64_t{2}, shape[0] - 1}) {
      for (const bool add : {false, true}) {
        const Owned x = test::random_normal("x", {shape[0], shape[1]}, 1, 0, 5);
        const Owned mine = test::random_normal("mine", {shape[1]});
        const Owned y = test::random_normal("y", {shape[1]});
        std::vector<float> expected(static_cast<size_t>(shape[1]));
        for (int64_t i = 0; i < shape[1]; ++i) {
          const auto part = [&](int64_t r) {
            return r == own ? mine.tensor().f32()[i]
                            : x.tensor().f32()[r * x.tensor().row_stride + i];
          };
          float sum = part(0);
          for (int64_t r = 1; r < shape[0]; ++r) sum += part(r);
          expected[static_cast<size_t>(i)] = add ? y.tensor().f32()[i] + sum : sum;
        }
        ops::run(s, ops::SumParts{.y_N = y, .x_RN = x, .own_N = mine, .own = own, .add = add});
        EXPECT_EQ(std::vector<float>(y.tensor().f32(), y.tensor().f32() + shape[1]), expected);
      }
    }
  }
}

TEST(Copy, StridedRows) {
  CpuStream s;
  for (const auto* shape : {kSmall, kLarge}) {
    for (const int64_t gap : {0, 5}) {
      const Owned x = test::random_normal("x", {shape[0], shape[1]}, 1, 0, 5 - gap);
      const Owned y = test::poisoned({shape[0], shape[1]}, gap);
      ops::run(s, ops::Copy{.y = y, .x = x});
      EXPECT_TRUE(test::bitwise_equal(y, x));
      EXPECT_TRUE(y.gaps_intact());
    }
  }
}

TEST(Copy, Bfloat16RoundsToNearestEven) {
  CpuStream s;
  const float nan = std::nanf("");
  const std::vector<float> values = {1.0f,  0x1.01p0f,       0x1.03p0f, 0x1.010002p0f, -0x1.01p0f,
                                     3e38f, 0x1.fffffep127f, 1e-40f,    -0.0f,         nan};
  const std::vector<float> expected = {1.0f,        1.0f,     0x1.04p0f, 0x1.02p0f, -1.0f,
                                       0x1.c4p127f, INFINITY, 0x1p-133f, -0.0f,     nan};
  std::vector<float> input = values;
  std::vector<uint16_t> packed(values.size());
  std::vector<float> output(values.size());
  const auto n = static_cast<int64_t>(values.size());
  const Tensor x(input.data(), DType::kF32, {n});
  const Tensor b(packed.data(), DType::kBF16, {n});
  const Tensor y(output.data(), DType::kF32, {n});
  ops::run(s, ops::Copy{.y = b, .x = x});
  ops::run(s, ops::Copy{.y = y, .x = b});
  for (size_t i = 0; i < values.size(); ++i) {
    if (std::isnan(expected[i])) {
      EXPECT_TRUE(std::isnan(output[i]));
    } else {
      EXPECT_EQ(output[i], expected[i]) << "of " << values[i];
    }
  }
  EXPECT_THROW(
      ops::run(s, ops::Copy{.y = b, .x = test::integers(std::vector<int32_t>(values.size()))}),
      Error);
}

TEST(Add, AddsInPlace) {
  CpuStream s;
  for (const auto* shape : {kSmall, kLarge}) {
    const Owned x = test::random_normal("x", {shape[0], shape[1]}, 1, 0, 2);
    const Owned y = test::random_normal("y", {shape[0], shape[1]}, 1, 0, 1);
    std::vector<double> expected = test::to_f64(y);
    const std::vector<double> other = test::to_f64(x);
    for (size_t i = 0; i < expected.size(); ++i) expected[i] += other[i];
    ops::run(s, ops::Add{.y = y, .x = x});
    EXPECT_LE(test::relative_error(y, expected), 1e-7);
    EXPECT_TRUE(y.gaps_intact());
  }
}

TEST(HostCopies, RoundTrip) {
  CpuStream s;
  const std::vector<int32_t> values = {5, -1, 7};
  const Owned t(DType::kI32, {3});
  ops::run(s, ops::CopyFromHost{.y = t, .host = values.data()});
  std::vector<int32_t> back(3);
  ops::run(s, ops::CopyToHost{.host = back.data(), .x = t});
  ops::run(s, ops::Synchronize{});
  EXPECT_EQ(back, values);
  EXPECT_THROW(
      ops::run(s, ops::CopyFromHost{.y = test::poisoned({2, 2}, 1), .host = values.data()}), Error);
}

TEST(Checks, MismatchesThrowAndNameTheTensor) {
  CpuStream s;
  const Owned a = test::poisoned({3, 4});
  const Owned b = test::poisoned({4, 3});
  try {
    ops::run(s, ops::Add{.y = a, .x = b});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kInternal);
    EXPECT_STREQ(error.what(), "add: x must be f32 or bf16[3, 4], got f32[4, 3]");
  }
  EXPECT_THROW(ops::run(s, ops::Add{.y = a, .x = Owned(DType::kI32, {3, 4})}), Error);
  EXPECT_THROW(
      ops::run(s, ops::RmsNorm{.y_TD = a, .x_TD = a, .w_D = test::poisoned({3}), .eps = 1e-5f}),
      Error);
  EXPECT_THROW(ops::run(s, ops::Linear{.y_TN = a, .x_TK = a, .w_NK = a}), Error);
}

}  // namespace
}  // namespace sbtrain
