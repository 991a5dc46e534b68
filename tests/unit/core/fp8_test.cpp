#include "core/fp8.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "core/error.h"
#include "core/precision.h"

namespace sbtrain {
namespace {

constexpr DType kFormats[] = {DType::kE4M3, DType::kE5M2};

TEST(Fp8, KnowsTheNumbersOfThePaper) {
  // arXiv 2209.05433, table 1.
  EXPECT_EQ(fp8_to_f32(0x7e, DType::kE4M3), 448.0f);
  EXPECT_EQ(fp8_to_f32(0x08, DType::kE4M3), 0x1p-6f);
  EXPECT_EQ(fp8_to_f32(0x01, DType::kE4M3), 0x1p-9f);
  EXPECT_TRUE(std::isnan(fp8_to_f32(0x7f, DType::kE4M3)));
  EXPECT_EQ(fp8_to_f32(0x7b, DType::kE5M2), 57344.0f);
  EXPECT_EQ(fp8_to_f32(0x04, DType::kE5M2), 0x1p-14f);
  EXPECT_EQ(fp8_to_f32(0x01, DType::kE5M2), 0x1p-16f);
  EXPECT_EQ(fp8_to_f32(0xfc, DType::kE5M2), -std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(fp8_to_f32(0x7d, DType::kE5M2)));
}

TEST(Fp8, EveryFiniteNumberComesBack) {
  for (const DType dtype : kFormats) {
    for (int bits = 0; bits < 256; ++bits) {
      const float value = fp8_to_f32(static_cast<uint8_t>(bits), dtype);
      if (!std::isfinite(value)) continue;
      EXPECT_EQ(f32_to_fp8(value, dtype), bits) << dtype_name(dtype);
    }
  }
}

// The pattern of the finite number that is nearest to x, of two the even one.
int nearest(float x, DType dtype) {
  const double size = std::min(std::abs(x), fp8_max(dtype));
  int best = 0;
  double distance = std::numeric_limits<double>::infinity();
  for (int bits = 0; bits <= fp8_format(dtype).largest; ++bits) {
    const double d = std::abs(double{fp8_to_f32(static_cast<uint8_t>(bits), dtype)} - size);
    if (d < distance || (d == distance && bits % 2 == 0)) {
      best = bits;
      distance = d;
    }
  }
  return best | (std::signbit(x) ? 0x80 : 0);
}

TEST(Fp8, RoundsToTheNearestAndToEven) {
  // All bf16, and f32 a little beside them: ties, and numbers that only just are none.
  for (uint32_t high = 0; high < 0x10000; ++high) {
    for (const uint32_t low : {0x0000u, 0x0001u, 0xffffu}) {
      const auto x = std::bit_cast<float>(high << 16 | low);
      if (x != x || (high % 7 != 0 && low != 0)) continue;
      for (const DType dtype : kFormats) {
        ASSERT_EQ(f32_to_fp8(x, dtype), nearest(x, dtype)) << x << " " << dtype_name(dtype);
      }
    }
  }
  for (const DType dtype : kFormats) EXPECT_EQ(f32_to_fp8(NAN, dtype), 0x7f);
}

TEST(Fp8, ScalesTheLargestElementToTheLargestNumber) {
  for (const DType dtype : kFormats) {
    for (const float amax : {0x1p-100f, 0.3f, 1.0f, 7e4f, 0x1p120f}) {
      EXPECT_NEAR(amax * fp8_scale(amax, dtype), fp8_max(dtype), 1e-6 * fp8_max(dtype));
    }
    EXPECT_EQ(fp8_scale(0, dtype), 1.0f);
    EXPECT_EQ(fp8_scale(0x1p-149f, dtype), 0x1p126f);
    EXPECT_EQ(fp8_scale(HUGE_VALF, dtype), 0.0f);
    EXPECT_TRUE(std::isnan(fp8_scale(NAN, dtype)));
  }
}

TEST(PrecisionPolicy, SaysWhatLinearLayersTake) {
  const PrecisionPolicy held = precision_policy(Precision::kBf16, DType::kBF16);
  EXPECT_FALSE(held.linear.fp8());
  EXPECT_EQ(held.linear.gradients, DType::kBF16);
  const PrecisionPolicy fp8 = precision_policy(Precision::kFp8, DType::kF32);
  EXPECT_TRUE(fp8.linear.fp8());
  EXPECT_EQ(fp8.linear.weights, DType::kE4M3);
  EXPECT_EQ(fp8.linear.gradients, DType::kE5M2);
  EXPECT_EQ(fp8.activations, DType::kF32);
}

TEST(Tensor, OfFp8) {
  uint8_t bytes[6] = {};
  const Tensor t(bytes, DType::kE5M2, {2, 3});
  EXPECT_EQ(t.bytes(), 6u);
  EXPECT_EQ(t.describe(), "e5m2[2, 3]");
  EXPECT_EQ(t.row_range(1, 1).fp8(), bytes + 3);
  EXPECT_THROW(t.f32(), Error);
  EXPECT_THROW(Tensor(bytes, DType::kU8, {6}).fp8(), Error);
}

}  // namespace
}  // namespace sbtrain
