#include "ops/sampling.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "support/tensors.h"

namespace sbtrain::test {
namespace {

int32_t argmax(std::vector<float> x, int64_t vocab) {
  CpuStream s;
  const auto count = static_cast<int64_t>(x.size());
  int32_t y = 9;
  ops::run(s, ops::Argmax{.y_B = Tensor(&y, DType::kI32, {1}),
                          .x_BV = Tensor(x.data(), DType::kF32, {1, count}),
                          .vocab = vocab});
  return y;
}

TEST(Argmax, TheSmallestOfEqualsWithinTheVocabulary) {
  EXPECT_EQ(argmax({-3, -1, -2, 7}, 3), 1);
  EXPECT_EQ(argmax({-3, -1, -1, 7}, 4), 3);
  EXPECT_EQ(argmax({5, 2, 5}, 3), 0);
}

TEST(Argmax, NothingAmongNumbersThatAreNone) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(argmax({1, kInfinity, 2}, 3), -1);
  EXPECT_EQ(argmax({1, -kInfinity, 2}, 3), 2);
  EXPECT_EQ(argmax({kNan, 1, 2}, 3), -1);
  EXPECT_EQ(argmax({1, 2, kNan}, 3), -1);
  EXPECT_EQ(argmax({1, 2, kNan}, 2), 1);
}

}  // namespace
}  // namespace sbtrain::test
