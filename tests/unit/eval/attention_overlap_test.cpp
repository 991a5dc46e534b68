// Overlap of attention with true positions, against sets built by hand.
#include "eval/attention_overlap.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "core/error.h"
#include "core/philox.h"

namespace sbtrain {
namespace {

AttentionMap random_map(int64_t tokens, uint64_t seed) {
  const Philox random(seed, RandomPurpose::kTest, "map");
  AttentionMap map;
  map.tokens = tokens;
  map.weights_TT.resize(static_cast<size_t>(tokens * tokens));
  for (int64_t j = 0; j < tokens; ++j) {
    double sum = 0;
    const auto weight = [&](int64_t i) { return std::pow(random.uniform(j * tokens + i), 8); };
    for (int64_t i = 0; i <= j; ++i) sum += weight(i);
    for (int64_t i = 0; i <= j; ++i) {
      map.weights_TT[static_cast<size_t>(j * tokens + i)] = static_cast<float>(weight(i) / sum);
    }
  }
  return map;
}

using Pairs = std::set<std::pair<int64_t, int64_t>>;

double iou(const Pairs& a, const Pairs& b) {
  double both = 0;
  for (const auto& pair : a) both += b.contains(pair);
  return both / (static_cast<double>(a.size() + b.size()) - both);
}

TEST(AttentionOverlap, IsThatOfTheSets) {
  constexpr int64_t kTokens = 30;
  constexpr double kThreshold = 0.2;
  AttentionOverlap overlap(kThreshold);
  Pairs truth;
  Pairs top;
  Pairs above;
  double smaller = 0;
  double larger = 0;
  double mass = 0;
  for (int64_t example = 0; example < 4; ++example) {
    const AttentionMap map = random_map(kTokens, static_cast<uint64_t>(example));
    std::vector<TruePosition> positions;
    const auto key = [&](int64_t j, int64_t i) {
      return std::make_pair(example * kTokens + j, example * kTokens + i);
    };
    for (const int64_t query : {3, 11, 17, 29}) {
      std::set<int64_t> keys = {query / 2};
      if (query == 17) keys.insert({0, 16});
      for (const int64_t i : keys) {
        positions.push_back({query, i});
        truth.insert(key(query, i));
      }
      const auto weight = [&](int64_t i) {
        return double{map.weights_TT[static_cast<size_t>(query * kTokens + i)]};
      };
      for (int64_t i = 0; i <= query; ++i) {
        size_t above_it = 0;
        for (int64_t n = 0; n <= query; ++n) above_it += weight(n) > weight(i);
        if (above_it < keys.size()) top.insert(key(query, i));
        if (weight(i) > kThreshold) above.insert(key(query, i));
        const double target = keys.contains(i) ? 1 : 0;
        smaller += std::min(weight(i), target);
        larger += std::max(weight(i), target);
        mass += weight(i) * target;
      }
    }
    positions.push_back(positions.front());  // given twice, counts once
    overlap.add(map, positions);
  }
  EXPECT_EQ(overlap.queries(), 16);
  EXPECT_NEAR(overlap.top(), iou(top, truth), 1e-12);
  EXPECT_NEAR(overlap.threshold(), iou(above, truth), 1e-12);
  EXPECT_NEAR(overlap.soft(), smaller / larger, 1e-12);
  EXPECT_NEAR(overlap.mass(), mass / 16, 1e-12);
  EXPECT_GT(overlap.top(), 0);
  EXPECT_LT(overlap.top(), 1);
}

TEST(AttentionOverlap, OfAPerfectHeadIsOne) {
  AttentionMap map;
  map.tokens = 3;
  map.weights_TT = {0, 0, 0, 1, 0, 0, 0, 1, 0};
  AttentionOverlap overlap(0.5);
  EXPECT_TRUE(std::isnan(overlap.top()));
  overlap.add(map, std::vector<TruePosition>{{1, 0}, {2, 1}});
  EXPECT_EQ(overlap.top(), 1);
  EXPECT_EQ(overlap.threshold(), 1);
  EXPECT_EQ(overlap.soft(), 1);
  EXPECT_EQ(overlap.mass(), 1);
}

TEST(AttentionOverlap, RefusesPositionsOutsideOfTheMap) {
  const AttentionMap map = random_map(4, 1);
  for (const TruePosition position :
       {TruePosition{4, 0}, TruePosition{2, 3}, TruePosition{1, -1}}) {
    AttentionOverlap overlap(0.5);
    EXPECT_THROW(overlap.add(map, std::vector<TruePosition>{position}), Error);
  }
}

}  // namespace
}  // namespace sbtrain
