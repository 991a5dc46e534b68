#include "serve/sampling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>

#include "core/error.h"
#include "core/philox.h"

namespace sbtrain {
namespace {

std::vector<float> random_logits(size_t count) {
  const Philox random(4, RandomPurpose::kTest, "logits");
  std::vector<float> logits(count);
  for (size_t i = 0; i < count; ++i) logits[i] = static_cast<float>(3 * random.normal(i));
  return logits;
}

// The definition, sorted whole and in fp64.
std::vector<double> distribution(const std::vector<float>& logits, const SamplingOptions& options) {
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
  if (options.top_k > 0) order.resize(std::min<size_t>(options.top_k, order.size()));
  std::vector<double> p(logits.size());
  double sum = 0;
  std::erase_if(order, [&](int32_t i) {
    return std::exp((logits[i] - logits[order[0]]) / options.temperature) < options.min_p;
  });
  for (const int32_t i : order) sum += p[i] = std::exp(logits[i] / options.temperature);
  double mass = 0;
  for (const int32_t i : order) {
    p[i] = mass < options.top_p || mass == 0 ? p[i] / sum : 0;
    mass += p[i];
  }
  for (double& x : p) x /= mass;
  return p;
}

TEST(Sampling, DrawsFromTheDistribution) {
  const std::vector<float> logits = random_logits(150);
  for (const SamplingOptions& options :
       {SamplingOptions{.temperature = 1, .top_p = 1}, SamplingOptions{.temperature = 1.5},
        SamplingOptions{.temperature = 0.7, .top_k = 40, .top_p = 1},
        SamplingOptions{.temperature = 2, .top_k = 70, .top_p = 0.8},
        SamplingOptions{.temperature = 1, .top_p = 1, .min_p = 0.05},
        SamplingOptions{.temperature = 2, .top_k = 70, .top_p = 0.9, .min_p = 0.1},
        SamplingOptions{.temperature = 1, .top_p = 1, .min_p = 1}}) {
    constexpr int kDraws = 20000;
    std::vector<int> counts(logits.size());
    for (int i = 0; i < kDraws; ++i) ++counts[sample_token(logits, options, i)];
    const std::vector<double> p = distribution(logits, options);
    for (size_t i = 0; i < p.size(); ++i) {
      if (p[i] == 0) {
        EXPECT_EQ(counts[i], 0) << i;
      }
      const double error = std::sqrt(p[i] * kDraws) + 1;
      EXPECT_NEAR(counts[i], p[i] * kDraws, 5 * error) << i;
    }
  }
}

TEST(Sampling, TheLikeliestTokenAtNoTemperature) {
  std::vector<float> logits = {0, 5, 5, -1};
  EXPECT_EQ(sample_token(logits, {.temperature = 0}, 0), 1);
  EXPECT_EQ(sample_token(logits, {.temperature = 1e-30}, 7), 1);
}

TEST(Sampling, ChangesOfLogits) {
  const std::vector<int32_t> seen = {0, 2, 3, 99}, banned = {1, 3, -1};
  std::vector<float> logits = {3, 4, -2, 5, 0.5};
  change_logits({.repetition_penalty = 2, .seen = seen, .banned = banned}, logits);
  constexpr float kNever = std::numeric_limits<float>::lowest();
  EXPECT_EQ(logits, (std::vector<float>{1.5, kNever, -4, kNever, 0.5}));
  // However hot, and whatever rounding leaves: no banned token.
  std::vector<float> flat(300, 0.0f);
  std::vector<int32_t> most(299);
  std::iota(most.begin(), most.end(), 1);
  change_logits({.banned = most}, flat);
  for (int i = 0; i < 2000; ++i)
    EXPECT_EQ(sample_token(flat, {.temperature = 100, .top_p = 1}, i), 0);
}

TEST(Sampling, LogprobsAreThoseOfTheSoftmax) {
  const std::vector<float> logits = random_logits(3001);
  double sum = 0;
  for (const float x : logits) sum += std::exp(static_cast<double>(x));
  for (const int32_t token : {0, 17, 3000}) {
    const TokenLogprob p = token_logprob(logits, token, 5);
    EXPECT_NEAR(p.logprob, logits[token] - std::log(sum), 2e-6);
    ASSERT_EQ(p.top.size(), 5U);
    for (size_t i = 0; i + 1 < 5; ++i) EXPECT_GE(p.top[i].second, p.top[i + 1].second);
    EXPECT_EQ(p.top[0].first, sample_token(logits, {.temperature = 0}, 0));
    EXPECT_EQ(p.top[0].second, token_logprob(logits, p.top[0].first, 1).logprob);
    EXPECT_EQ(p.top[0], token_logprob(logits, token, 1).top[0]);
  }
}

// The model may have more tokens than its tokenizer. What is drawn is one of the latter, but the
// list has all that share the probability.
TEST(Sampling, ListsTokensBeyondTheTokenizer) {
  const std::vector<float> logits = {1, 2, 3, 9};
  EXPECT_EQ(token_logprob(logits, 0, 9).top.size(), 4U);
  EXPECT_EQ(token_logprob(logits, 0, 1).top[0].first, 3);
  double sum = 0;
  for (const auto& [token, logprob] : token_logprob(logits, 0, 4).top) sum += std::exp(logprob);
  EXPECT_NEAR(sum, 1, 1e-6);
}

TEST(Sampling, ImprobableTokensAreNumbers) {
  const std::vector<float> logits = {0, std::numeric_limits<float>::lowest()};
  EXPECT_TRUE(std::isfinite(token_logprob(logits, 1, 1).logprob));
}

TEST(Sampling, LogitsThatAreNotFiniteAreRefused) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const std::vector<float>& logits :
       {std::vector{kNan, kNan}, {0.0f, kNan}, {kInfinity, 0.0f}, {-kInfinity, -kInfinity}}) {
    EXPECT_THROW(sample_token(logits, {.temperature = 1}, 0), Error);
    EXPECT_THROW(token_logprob(logits, 1, 1), Error);
  }
}

}  // namespace
}  // namespace sbtrain
