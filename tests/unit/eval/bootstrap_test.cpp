// Intervals of losses by the bootstrap over documents.
#include "eval/bootstrap.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/philox.h"
#include "unit/data/stores.h"

namespace sbtrain {
namespace {

// Documents of `tokens` tokens each, with losses of mean 3 and this standard deviation between
// them.
std::vector<DocumentScore> random_documents(int64_t count, double deviation, uint64_t seed,
                                            int64_t tokens = 100) {
  const Philox random(seed, RandomPurpose::kTest, "losses");
  std::vector<DocumentScore> documents;
  for (int64_t n = 0; n < count; ++n) {
    const double loss = 3 + deviation * random.normal(static_cast<uint64_t>(n));
    documents.push_back({.store = 0,
                         .document = n,
                         .loss_sum = loss * static_cast<double>(tokens),
                         .tokens = tokens});
  }
  return documents;
}

// The interval of a mean of n independent numbers is 1.96 standard deviations / sqrt(n) on each
// side.
TEST(Bootstrap, WidthIsThatOfTheMean) {
  const auto interval = loss_interval(random_documents(400, 0.5, 1), 2000);
  ASSERT_TRUE(interval);
  EXPECT_NEAR(interval->high - interval->low, 2 * 1.96 * 0.5 / std::sqrt(400.0), 0.012);
  EXPECT_LT(interval->low, 3.05);
  EXPECT_GT(interval->high, 2.95);
}

TEST(Bootstrap, HoldsTheMeanAsOftenAsItSays) {
  int held = 0;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const auto interval = loss_interval(random_documents(60, 0.5, seed), 400);
    held += interval->low <= 3 && 3 <= interval->high;
  }
  EXPECT_GE(held, 178);  // of 190
  EXPECT_LE(held, 198);
}

// Tokens count equally, not documents: a large document moves the mean more.
TEST(Bootstrap, WeighsByTokens) {
  const std::vector<DocumentSum> documents = {{.sum = 100, .tokens = 100}, {.sum = 0, .tokens = 1}};
  const auto interval = bootstrap_interval(documents, 1000);
  ASSERT_TRUE(interval);
  EXPECT_EQ(interval->low, 0);
  EXPECT_EQ(interval->high, 1);
  const std::vector<DocumentSum> equal = {{.sum = 30, .tokens = 10}, {.sum = 60, .tokens = 20}};
  EXPECT_DOUBLE_EQ(bootstrap_interval(equal, 100)->low, 3);
  EXPECT_DOUBLE_EQ(bootstrap_interval(equal, 100)->high, 3);
}

// What both models find hard cancels.
TEST(Bootstrap, PairsAreNarrower) {
  const std::vector<DocumentScore> a = random_documents(50, 0.5, 1);
  std::vector<DocumentScore> b = a;
  for (DocumentScore& document : b) document.loss_sum += 0.01 * 100;
  const auto difference = difference_interval(a, b, 500);
  ASSERT_TRUE(difference);
  EXPECT_NEAR(difference->low, -0.01, 1e-9);
  EXPECT_NEAR(difference->high, -0.01, 1e-9);
  b.back().tokens += 1;
  EXPECT_TRUE(test::thrown_by([&] { difference_interval(a, b, 500); }).says("101 of document 49"));
  b.pop_back();
  EXPECT_TRUE(test::thrown_by([&] { difference_interval(a, b, 500); }).says("50 documents"));
}

TEST(Bootstrap, NeedsTwoDocumentsThatCount) {
  EXPECT_FALSE(loss_interval(random_documents(1, 0.5, 1), 100));
  std::vector<DocumentScore> documents = random_documents(2, 0.5, 1);
  EXPECT_TRUE(loss_interval(documents, 100));
  EXPECT_FALSE(loss_interval(documents, 0));
  documents[1] = {.store = 0, .document = 1, .loss_sum = 0, .tokens = 0};
  EXPECT_FALSE(loss_interval(documents, 100));
}

TEST(Bootstrap, Repeats) {
  const std::vector<DocumentScore> documents = random_documents(20, 0.5, 1);
  EXPECT_EQ(loss_interval(documents, 100)->low, loss_interval(documents, 100)->low);
}

}  // namespace
}  // namespace sbtrain
