#include "ops/rope.h"

#include <gtest/gtest.h>

#include <cmath>
#include <tuple>

#include "core/error.h"
#include "support/tensors.h"

namespace sbtrain {
namespace {

using test::CpuStream;
using test::Owned;
using Values = std::vector<double>;

// Of each head the first `turned` channels; 0: all.
Values rotated(const Values& x, const Owned& positions, int64_t heads, double base, double sign,
               int64_t turned = 0) {
  const int64_t tokens = positions.tensor().numel();
  const int64_t cols = static_cast<int64_t>(x.size()) / tokens;
  const int64_t head_dim = cols / heads;
  const int64_t rotated = turned > 0 ? turned : head_dim;
  Values y = x;
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t i = 0; i < rotated / 2; ++i) {
        const auto a = static_cast<size_t>(t * cols + h * head_dim + i);
        const size_t b = a + static_cast<size_t>(rotated / 2);
        const double angle =
            sign * positions.i32()[t] *
            std::pow(base, -2.0 * static_cast<double>(i) / static_cast<double>(rotated));
        y[a] = x[a] * std::cos(angle) - x[b] * std::sin(angle);
        y[b] = x[b] * std::cos(angle) + x[a] * std::sin(angle);
      }
    }
  }
  return y;
}

TEST(Rope, MatchesReferenceAtEveryPosition) {
  CpuStream s;
  for (const auto& [heads, head_dim] : {std::pair{1, 2}, {3, 6}, {4, 32}, {2, 128}}) {
    for (const double base : {10000.0, 500000.0}) {
      const Owned x = test::random_normal("x", {200, heads * head_dim}, 1, 0, 5);
      const Owned positions = test::random_integers("positions", 200, 65537);
      const Values before = test::to_f64(x);
      ops::run(s, ops::Rope{.x_THd = x,
                            .positions_T = positions,
                            .params = {.heads = heads,
                                       .frequencies = ops::rope_frequencies(base, head_dim)}});
      EXPECT_LE(test::relative_error(x, rotated(before, positions, heads, base, 1)), 2e-7);
      EXPECT_TRUE(x.gaps_intact());
    }
  }
}

TEST(Rope, InverseIsTheGradient) {
  CpuStream s;
  const Owned x = test::random_normal("x", {7, 24});
  const Owned dy = test::random_normal("dy", {7, 24});
  const Owned positions = test::integers({0, 1, 2, 0, 1, 2, 3});
  const Values G = test::to_f64(dy);
  const auto objective = [&](const Values& v) {
    const Values y = rotated(v, positions, 3, 10000, 1);
    double sum = 0;
    for (size_t i = 0; i < y.size(); ++i) sum += y[i] * G[i];
    return sum;
  };
  ops::run(s, ops::Rope{.x_THd = dy,
                        .positions_T = positions,
                        .params = {.heads = 3,
                                   .frequencies = ops::rope_frequencies(10000, 8),
                                   .inverse = true}});
  EXPECT_LE(test::relative_error(dy, test::numeric_gradient(objective, test::to_f64(x))), 1e-6);
}

// The first channels of each head; the others keep their bits.
TEST(Rope, RotatesAPartOfEachHead) {
  CpuStream s;
  for (const auto& [heads, head_dim, part] :
       {std::tuple{1, 4, 2}, {3, 6, 4}, {4, 32, 8}, {2, 128, 32}, {3, 5, 4}}) {
    for (const bool inverse : {false, true}) {
      const Owned x = test::random_normal("x", {200, heads * head_dim}, 1, 0, 5);
      const Owned positions = test::random_integers("positions", 200, 65537);
      const Values before = test::to_f64(x);
      ops::run(s, ops::Rope{.x_THd = x,
                            .positions_T = positions,
                            .params = {.heads = heads,
                                       .frequencies = ops::rope_frequencies(10000, part),
                                       .inverse = inverse,
                                       .rotated = part}});
      const Values after = test::to_f64(x);
      EXPECT_LE(
          test::relative_error(x, rotated(before, positions, heads, 10000, inverse ? -1 : 1, part)),
          2e-7);
      for (size_t i = 0; i < after.size(); ++i) {
        if (static_cast<int64_t>(i) % head_dim >= part) {
          ASSERT_EQ(after[i], before[i]);
        }
      }
      EXPECT_TRUE(x.gaps_intact());
    }
  }
}

// Rows of texts of their own lengths turn by the base of dynamic_ntk for the rotated channels.
TEST(Rope, APartOfEachHeadByTheLengthOfItsText) {
  CpuStream s;
  const Owned x = test::random_normal("x", {6, 24});
  const Owned positions = test::integers({0, 5, 100, 7, 9000, 3});
  const Owned lengths = test::integers({8, 8, 300, 300, 9001, 9001});
  const Values before = test::to_f64(x);
  const ops::DynamicNtk dynamic = {.base = 10000, .factor = 2.5, .train_length = 64};
  ops::run(s, ops::Rope{.x_THd = x,
                        .positions_T = positions,
                        .params = {.heads = 2,
                                   .frequencies = ops::rope_frequencies(10000, 6),
                                   .rotated = 6,
                                   .dynamic = dynamic},
                        .lengths_T = lengths});
  for (int64_t t = 0; t < 6; ++t) {
    const Owned position = test::integers({positions.i32()[t]});
    const double length = lengths.i32()[t];
    const double base = length <= 64 ? 10000 : 10000 * std::pow(2.5 * length / 64 - 1.5, 6.0 / 4.0);
    const Values row(before.begin() + t * 24, before.begin() + (t + 1) * 24);
    EXPECT_LE(
        test::relative_error(x.tensor().row_range(t, 1), rotated(row, position, 2, base, 1, 6)),
        1e-6)
        << t;
  }
}

TEST(Rope, PositionZeroChangesNothing) {
  CpuStream s;
  const Owned x = test::random_normal("x", {3, 8});
  const Owned before(x);
  ops::run(s, ops::Rope{.x_THd = x,
                        .positions_T = test::integers({0, 0, 0}),
                        .params = {.heads = 2, .frequencies = ops::rope_frequencies(10000, 4)}});
  EXPECT_TRUE(test::bitwise_equal(x, before));
}

TEST(Rope, OddHeadsAreRefused) {
  CpuStream s;
  const Owned x = test::poisoned({2, 9});
  EXPECT_THROW(ops::run(s, ops::Rope{.x_THd = x,
                                     .positions_T = test::integers({0, 1}),
                                     .params = {.heads = 3, .frequencies = {1.0}}}),
               Error);
}

TEST(Rope, MoreChannelsThanAHeadHasAreRefused) {
  CpuStream s;
  const Owned x = test::poisoned({2, 8});
  EXPECT_THROW(ops::run(s, ops::Rope{.x_THd = x,
                                     .positions_T = test::integers({0, 1}),
                                     .params = {.heads = 2,
                                                .frequencies = ops::rope_frequencies(10000, 6),
                                                .rotated = 6}}),
               Error);
}

TEST(Rope, FrequenciesOfAnotherHeadAreRefused) {
  CpuStream s;
  const Owned x = test::poisoned({2, 8});
  EXPECT_THROW(ops::run(s, ops::Rope{.x_THd = x,
                                     .positions_T = test::integers({0, 1}),
                                     .params = {.heads = 2, .frequencies = {1.0}}}),
               Error);
}

}  // namespace
}  // namespace sbtrain
