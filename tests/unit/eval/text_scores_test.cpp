// Scores of generated texts, and their means.
#include "eval/text_scores.h"

#include <gtest/gtest.h>

#include <cmath>

namespace sbtrain {
namespace {

double match(std::string_view generated, const std::vector<std::string>& answers) {
  return string_match_all(generated, answers);
}

TEST(StringMatchAll, LooksForEachAnswerAnywhere) {
  EXPECT_EQ(match(" 1234567.", {"1234567"}), 1);
  EXPECT_EQ(match("it is\n\"1234567\"!\x01", {"1234567"}), 1);
  EXPECT_EQ(match("91234567", {"1234567"}), 1);  // as in RULER: a part of a longer number counts
  EXPECT_EQ(match("123456", {"1234567"}), 0);
  EXPECT_EQ(match("123 4567", {"1234567"}), 0);
  EXPECT_EQ(match("", {"1234567"}), 0);
}

TEST(StringMatchAll, IgnoresTheCaseOfLetters) {
  EXPECT_EQ(match("abcde, FGHIJ", {"ABCDE", "fghij"}), 1);
  EXPECT_EQ(match("D3ADBEEF", {"d3adbeef"}), 1);
}

TEST(StringMatchAll, IsTheShareThatIsFound) {
  EXPECT_EQ(match("apple pear", {"apple", "pear", "plum", "fig"}), 0.5);
  EXPECT_EQ(match("apple apple", {"apple", "pear"}), 0.5);
  EXPECT_EQ(match("pear apple", {"apple", "pear"}), 1);  // in any order
}

std::vector<SampleScore> scores(int right, int wrong) {
  std::vector<SampleScore> scores(static_cast<size_t>(right), {.score = 1});
  scores.resize(static_cast<size_t>(right + wrong));
  return scores;
}

// Wilson's interval as tabulated, for instance by statsmodels' proportion_confint.
TEST(MeanScore, HasWilsonsInterval) {
  const ScoreMean most = mean_score(scores(98, 2));
  EXPECT_EQ(most.samples, 100);
  EXPECT_DOUBLE_EQ(most.mean, 0.98);
  EXPECT_NEAR(most.low, 0.92999, 1e-5);
  EXPECT_NEAR(most.high, 0.99450, 1e-5);
  const ScoreMean none = mean_score(scores(0, 10));
  EXPECT_EQ(none.low, 0);
  EXPECT_NEAR(none.high, 0.27754, 1e-5);
  const ScoreMean all = mean_score(scores(10, 0));
  EXPECT_NEAR(all.low, 0.72246, 1e-5);
  EXPECT_EQ(all.high, 1);
  EXPECT_EQ(mean_score({}).samples, 0);
}

TEST(ScoresByDepth, AreCountedByTenthsOrByTheChosenDepths) {
  std::vector<SampleScore> drawn;
  for (const double depth : {0.0, 0.05, 0.15, 0.95, 1.0, -1.0}) {
    drawn.push_back({.score = depth > 0.5 ? 1.0 : 0.0, .depth = depth});
  }
  const std::vector<DepthScore> tenths = scores_by_depth(drawn, {});
  ASSERT_EQ(tenths.size(), 3U);
  EXPECT_EQ(tenths[0].score.samples, 2);
  EXPECT_EQ(tenths[1].from, 0.1);
  EXPECT_EQ(tenths[2].score.samples, 2);
  EXPECT_EQ(tenths[2].score.mean, 1);

  // Samples take turns, and with little filler a depth is met only roughly.
  const std::vector<double> chosen = {1, 0.4};
  std::vector<SampleScore> turns;
  for (int i = 0; i < 5; ++i) {
    turns.push_back({.score = i % 2 == 0 ? 1.0 : 0.0, .depth = i % 2 == 0 ? 1.0 : 0.5});
  }
  const std::vector<DepthScore> by_choice = scores_by_depth(turns, chosen);
  ASSERT_EQ(by_choice.size(), 2U);
  EXPECT_EQ(by_choice[0].from, 0.4);
  EXPECT_EQ(by_choice[0].score.samples, 2);
  EXPECT_EQ(by_choice[1].to, 1);
  EXPECT_EQ(by_choice[1].score.mean, 1);
}

}  // namespace
}  // namespace sbtrain
