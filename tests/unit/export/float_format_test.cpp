#include "export/float_format.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

namespace sbtrain {
namespace {

float round_trip(FileDType type, float value) {
  uint16_t stored = 0;
  float back = 0;
  from_f32(type, &value, 1, &stored);
  to_f32(type, &stored, 1, &back);
  return back;
}

// Every number of a type is kept, NaN as some NaN.
TEST(FloatFormat, EveryStoredNumberIsKept) {
  for (const FileDType type : {FileDType::kBF16, FileDType::kF16}) {
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
      const auto stored = static_cast<uint16_t>(bits);
      float value = 0;
      to_f32(type, &stored, 1, &value);
      uint16_t again = 0;
      from_f32(type, &value, 1, &again);
      if (std::isnan(value)) {
        EXPECT_TRUE(std::isnan(round_trip(type, value)));
      } else {
        EXPECT_EQ(again, stored) << file_dtype_name(type);
      }
    }
  }
}

// A number between two neighbours becomes the nearer one, one in the middle the even one.
TEST(FloatFormat, RoundsToNearestEven) {
  for (const FileDType type : {FileDType::kBF16, FileDType::kF16}) {
    const uint32_t largest = type == FileDType::kBF16 ? 0x7F7F : 0x7BFF;
    for (uint32_t bits = 0; bits < largest; ++bits) {
      const uint16_t pair[2] = {static_cast<uint16_t>(bits), static_cast<uint16_t>(bits + 1)};
      float low_high[2];
      to_f32(type, pair, 2, low_high);
      const double middle = (static_cast<double>(low_high[0]) + low_high[1]) / 2;
      const auto tie = static_cast<float>(middle);
      if (static_cast<double>(tie) != middle) continue;  // f32 ends before the type does
      const float even = (bits & 1) == 0 ? low_high[0] : low_high[1];
      EXPECT_EQ(round_trip(type, tie), even);
      EXPECT_EQ(round_trip(type, std::nextafter(tie, 0.0f)), low_high[0]);
      EXPECT_EQ(round_trip(type, std::nextafter(tie, std::numeric_limits<float>::infinity())),
                low_high[1]);
      EXPECT_EQ(round_trip(type, -tie), -even);
    }
  }
}

TEST(FloatFormat, CountsWhatDoesNotFit) {
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> values = {65504.0f, 65519.9f, 65520.0f, -1e6f, infinity, 3e38f};
  std::vector<uint16_t> out(values.size());
  EXPECT_EQ(from_f32(FileDType::kF16, values.data(), values.size(), out.data()), 3U);
  EXPECT_EQ(from_f32(FileDType::kBF16, values.data(), values.size(), out.data()), 0U);
  const float most = std::numeric_limits<float>::max();
  EXPECT_EQ(from_f32(FileDType::kBF16, &most, 1, out.data()), 1U);
}

}  // namespace
}  // namespace sbtrain
