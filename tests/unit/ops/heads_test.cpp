#include "ops/heads.h"

#include <gtest/gtest.h>

#include "core/error.h"
#include "support/tensors.h"

namespace sbtrain {
namespace {

using test::CpuStream;
using test::Owned;
using Values = std::vector<double>;

constexpr int64_t kTokens = 35;
constexpr int kHeadDim = 5;

// Column c of `heads` heads is column shared(c) of `groups` heads.
int64_t shared(int64_t c, int64_t heads, int64_t groups) {
  return c / kHeadDim / (heads / groups) * kHeadDim + c % kHeadDim;
}

TEST(RepeatHeads, EachHeadServesItsGroup) {
  for (const auto& [heads, groups] : {std::pair{8, 8}, {8, 4}, {8, 2}, {8, 1}, {6, 2}, {1, 1}}) {
    CpuStream s;
    const Owned x = test::random_normal("x", {kTokens, groups * kHeadDim}, 1, 0, 3);
    const Owned y = test::poisoned({kTokens, heads * kHeadDim}, 2);
    ops::run(s, ops::RepeatHeads{.y_THd = y, .x_TGd = x, .head_dim = kHeadDim});
    const Owned dy = test::random_normal("dy", {kTokens, heads * kHeadDim}, 1, 0, 1);
    const Owned dx = test::poisoned({kTokens, groups * kHeadDim}, 4);
    ops::run(s, ops::RepeatHeadsBackward{.dx_TGd = dx, .dy_THd = dy, .head_dim = kHeadDim});
    const Values few = test::to_f64(x);
    const Values many = test::to_f64(dy);
    Values expected;
    Values sums(few.size());
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int64_t c = 0; c < heads * kHeadDim; ++c) {
        const int64_t from = t * groups * kHeadDim + shared(c, heads, groups);
        expected.push_back(few[static_cast<size_t>(from)]);
        sums[static_cast<size_t>(from)] += many[static_cast<size_t>(t * heads * kHeadDim + c)];
      }
    }
    EXPECT_EQ(test::to_f64(y), expected) << heads << " heads, " << groups;
    EXPECT_LE(test::relative_error(dx, sums), 1e-6) << heads << " heads, " << groups;
    EXPECT_TRUE(y.gaps_intact());
    EXPECT_TRUE(dx.gaps_intact());
  }
}

TEST(RepeatHeads, RefusesHeadsThatFormNoGroups) {
  CpuStream s;
  const Owned x = test::poisoned({kTokens, 2 * kHeadDim});
  const Owned y = test::poisoned({kTokens, 3 * kHeadDim});
  EXPECT_THROW(ops::run(s, ops::RepeatHeads{.y_THd = y, .x_TGd = x, .head_dim = kHeadDim}), Error);
}

}  // namespace
}  // namespace sbtrain
