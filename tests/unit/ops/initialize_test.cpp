#include "ops/initialize.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "support/tensors.h"

namespace sbtrain {
namespace {

using test::CpuStream;
using test::Owned;

// Storage [begin, begin + count) of a [5, 3] matrix whose rows are stored as 8 elements, in 7 rows.
std::vector<double> matrix(int64_t begin, int64_t count, const Init& init) {
  CpuStream s;
  const Owned x = test::poisoned({count});
  ops::run(s, ops::Initialize{.x_N = x,
                              .begin = begin,
                              .rows = 5,
                              .cols = 3,
                              .stored_cols = 8,
                              .init = init,
                              .random = Philox(7, RandomPurpose::kInit, "w")});
  return test::to_f64(x);
}

TEST(Initialize, PlacesTheNumbersOfLogicalElements) {
  const Philox random(7, RandomPurpose::kInit, "w");
  const std::vector<double> normal = matrix(0, 56, Init::normal(0.5));
  const std::vector<double> constant = matrix(0, 56, Init::constant(2));
  for (int64_t e = 0; e < 56; ++e) {
    const bool logical = e / 8 < 5 && e % 8 < 3;
    const auto number = static_cast<uint64_t>(e / 8 * 3 + e % 8);
    EXPECT_EQ(normal[e], logical ? static_cast<float>(0.5 * random.normal(number)) : 0.0) << e;
    EXPECT_EQ(constant[e], logical ? 2.0 : 0.0) << e;
  }
}

TEST(Initialize, RangesAreCutsOfTheWhole) {
  const std::vector<double> whole = matrix(0, 56, Init::normal(0.5));
  for (int64_t begin = 0; begin < 56; ++begin) {
    for (const int64_t count : {int64_t{1}, int64_t{9}, 56 - begin}) {
      if (begin + count > 56) continue;
      const std::vector<double> part = matrix(begin, count, Init::normal(0.5));
      for (int64_t i = 0; i < count; ++i) ASSERT_EQ(part[i], whole[begin + i]) << begin;
    }
  }
}

// More elements than one thread takes: the numbers do not depend on how they are spread.
TEST(Initialize, LargeRangesHaveTheNumbersOfTheirElements) {
  CpuStream s;
  constexpr int64_t kCount = 300'001;
  constexpr int64_t kBegin = (int64_t{1} << 33) + 5;  // beyond 32 bits
  const Owned x = test::poisoned({kCount});
  const Philox random(3, RandomPurpose::kInit, "large");
  ops::run(s, ops::Initialize{.x_N = x,
                              .begin = kBegin,
                              .rows = 2,
                              .cols = kBegin,
                              .stored_cols = kBegin,
                              .init = Init::normal(0.02),
                              .random = random});
  for (int64_t i = 0; i < kCount; ++i) {
    const double number = random.normal(static_cast<uint64_t>(kBegin + i));
    ASSERT_EQ(x.f32()[i], static_cast<float>(0.02 * number)) << i;
  }
}

}  // namespace
}  // namespace sbtrain
