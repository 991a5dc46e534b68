#include "ops/loss.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "ops/scratch.h"
#include "support/tensors.h"

namespace sbtrain {
namespace {

using test::CpuStream;
using test::Owned;
using Values = std::vector<double>;

struct Problem {
  int64_t tokens, vocab, width;
  double weight, logit_scale, z_loss;
};

// Naive loss and gradients in fp64, with all logits at once.
struct Reference {
  Values loss, dx, dw;
  double objective = 0;
};
Reference reference(const Problem& p, const Values& x, const Values& w, const int32_t* targets) {
  const auto vocab = static_cast<size_t>(p.vocab);
  const auto width = static_cast<size_t>(p.width);
  Reference out{Values(static_cast<size_t>(p.tokens)), Values(x.size()), Values(w.size())};
  Values z(vocab);
  for (size_t t = 0; t < out.loss.size(); ++t) {
    if (targets[t] < 0) continue;
    for (size_t v = 0; v < vocab; ++v) {
      z[v] = 0;
      for (size_t i = 0; i < width; ++i)
        z[v] += p.logit_scale * x[t * width + i] * w[v * width + i];
    }
    const double max = *std::max_element(z.begin(), z.end());
    double sum = 0;
    for (const double value : z) sum += std::exp(value - max);
    const double lse = max + std::log(sum);
    out.loss[t] = lse - z[static_cast<size_t>(targets[t])];
    out.objective += p.weight * (out.loss[t] + p.z_loss * lse * lse);
    for (size_t v = 0; v < vocab; ++v) {
      const double onehot = v == static_cast<size_t>(targets[t]) ? 1 : 0;
      const double dz =
          p.weight * ((1 + 2 * p.z_loss * lse) * std::exp(z[v] - lse) - onehot) * p.logit_scale;
      for (size_t i = 0; i < width; ++i) {
        out.dx[t * width + i] += dz * w[v * width + i];
        out.dw[v * width + i] += dz * x[t * width + i];
      }
    }
  }
  return out;
}

Owned some_targets(int64_t tokens, int64_t vocab) {
  const Owned targets = test::random_integers("targets", tokens, static_cast<int32_t>(vocab));
  for (int64_t t = 2; t < tokens; t += 5) targets.i32()[t] = -1;
  return targets;
}

void expect_matches(const Problem& p, double std) {
  CpuStream s;
  const Owned x = test::random_normal("x", {p.tokens, p.width}, std, 0, 3);
  const Owned w = test::random_normal("w", {p.vocab, p.width});
  const Owned targets = some_targets(p.tokens, p.vocab);
  const Owned loss = test::poisoned({p.tokens});
  const Owned dx = test::poisoned({p.tokens, p.width}, 2);
  const Owned dw = test::random_normal("dw", {p.vocab, p.width});
  const Reference expected = reference(p, test::to_f64(x), test::to_f64(w), targets.i32());
  const Values expected_dw = test::plus(test::to_f64(dw), expected.dw);
  const ops::CrossEntropy t{.loss_T = loss,
                            .dx_TD = dx,
                            .dw_VD = dw,
                            .x_TD = x,
                            .w_VD = w,
                            .targets_T = targets,
                            .loss_weight = static_cast<float>(p.weight),
                            .logit_scale = static_cast<float>(p.logit_scale),
                            .z_loss = static_cast<float>(p.z_loss)};
  ops::run(s, t);
  EXPECT_LE(test::relative_error(loss, expected.loss), 5e-6);
  EXPECT_LE(test::relative_error(dx, expected.dx), 1e-5);
  EXPECT_LE(test::relative_error(dw, expected_dw), 1e-5);
  EXPECT_TRUE(dx.gaps_intact());

  const Owned loss_only = test::poisoned({p.tokens});
  ops::CrossEntropy no_gradients = t;
  no_gradients.loss_T = loss_only;
  no_gradients.dx_TD = no_gradients.dw_VD = {};
  ops::run(s, no_gradients);
  EXPECT_TRUE(test::bitwise_equal(loss_only, loss));
}

TEST(CrossEntropy, MatchesReference) {
  expect_matches({1, 2, 1, 1, 1, 0}, 1);
  expect_matches({7, 31, 5, 0.125, 1, 0}, 1);
  expect_matches({70, 1000, 33, 0.25, 0.5, 1e-2}, 1);
  expect_matches({40, 257, 64, 1, 0.25, 0}, 10);  // logits around +-100
}

TEST(CrossEntropy, MatchesReferenceOverSeveralChunks) {
  constexpr int64_t kVocab = 32768;
  CpuStream s;
  const int64_t chunk = ops::logits_chunk_tokens(s, 1 << 20, kVocab);
  ASSERT_EQ(chunk, 64);
  for (const int64_t tokens : {chunk, chunk + 1, 2 * chunk + 5}) {
    expect_matches({tokens, kVocab, 4, 0.01, 1, 1e-3}, 1);
  }
}

TEST(CrossEntropy, GradientsMatchFiniteDifferences) {
  CpuStream s;
  const Problem p{6, 11, 4, 0.5, 0.75, 0.05};
  const Owned x = test::random_normal("x", {p.tokens, p.width});
  const Owned w = test::random_normal("w", {p.vocab, p.width});
  const Owned targets = some_targets(p.tokens, p.vocab);
  const Owned loss = test::poisoned({p.tokens});
  const Owned dx = test::poisoned({p.tokens, p.width});
  const Owned dw = test::constant({p.vocab, p.width}, 0);
  const Owned fresh = test::poisoned({p.vocab, p.width});
  for (const Owned* sum : {&dw, &fresh}) {
    ops::run(s, ops::CrossEntropy{.loss_T = loss,
                                  .dx_TD = dx,
                                  .dw_VD = *sum,
                                  .x_TD = x,
                                  .w_VD = w,
                                  .targets_T = targets,
                                  .loss_weight = 0.5f,
                                  .logit_scale = 0.75f,
                                  .z_loss = 0.05f,
                                  .accumulate_dw = sum == &dw});
  }
  EXPECT_EQ(test::to_f64(dw), test::to_f64(fresh));
  const Values X = test::to_f64(x);
  const Values W = test::to_f64(w);
  const auto by_x = [&](const Values& v) { return reference(p, v, W, targets.i32()).objective; };
  const auto by_w = [&](const Values& v) { return reference(p, X, v, targets.i32()).objective; };
  EXPECT_LE(test::relative_error(dx, test::numeric_gradient(by_x, X)), 1e-6);
  EXPECT_LE(test::relative_error(dw, test::numeric_gradient(by_w, W)), 1e-6);
}

TEST(CrossEntropy, IgnoredTokensCountNothingWhateverTheyHold) {
  CpuStream s;
  const Owned x = test::random_normal("x", {3, 4});
  const Owned w = test::random_normal("w", {9, 4});
  const Owned targets = test::integers({-1, -1, -1});
  const Owned loss = test::poisoned({3});
  const Owned dx = test::poisoned({3, 4});
  const Owned dw = test::constant({9, 4}, 0);
  ops::run(
      s, ops::CrossEntropy{
             .loss_T = loss, .dx_TD = dx, .dw_VD = dw, .x_TD = x, .w_VD = w, .targets_T = targets});
  EXPECT_EQ(test::to_f64(loss), Values(3, 0));
  EXPECT_EQ(test::to_f64(dx), Values(12, 0));
  EXPECT_EQ(test::to_f64(dw), Values(36, 0));
}

TEST(CrossEntropy, HitsAreTargetsLargerThanAllOthers) {
  CpuStream s;
  // x is the identity, so the logits of a token are the values of its row.
  const Values logits = {1, 3, 2,   // the largest
                         1, 3, 2,   // another is larger
                         3, 1, 3,   // two are equal and largest: no hit
                         1, 3, 2,   // ignored
                         2, 1, 0};  // the first
  const Owned x = test::generated({5, 5}, 0, [](int64_t i) { return i % 6 == 0 ? 1.0 : 0.0; });
  const Owned w = test::generated(
      {3, 5}, 0, [&](int64_t i) { return logits[static_cast<size_t>(i % 5 * 3 + i / 5)]; });
  const Owned targets = test::integers({1, 2, 0, -1, 0});
  const Owned loss = test::poisoned({5});
  const Owned hits = test::poisoned({5});
  const Owned dx = test::poisoned({5, 5});
  const Owned dw = test::constant({3, 5}, 0);
  ops::CrossEntropy t{.loss_T = loss, .hits_T = hits, .x_TD = x, .w_VD = w, .targets_T = targets};
  ops::run(s, t);
  EXPECT_EQ(test::to_f64(hits), (Values{1, 0, 0, 0, 1}));
  const Owned with_gradients = test::poisoned({5});
  t.hits_T = with_gradients;
  t.dx_TD = dx;
  t.dw_VD = dw;
  ops::run(s, t);
  EXPECT_TRUE(test::bitwise_equal(with_gradients, hits));
}

TEST(CrossEntropy, HitsMatchTheLargestLogitOverSeveralChunks) {
  CpuStream s;
  constexpr int64_t kTokens = 150;
  constexpr int64_t kVocab = 32768;  // chunks of 64 tokens
  const Owned x = test::random_normal("x", {kTokens, 4});
  const Owned w = test::random_normal("w", {kVocab, 4});
  const Owned targets = some_targets(kTokens, kVocab);
  Values expected(kTokens);
  for (int64_t i = 0; i < kTokens; ++i) {
    const auto logit = [&](int64_t v) {
      double z = 0;
      for (int64_t k = 0; k < 4; ++k) z += double{x.f32()[i * 4 + k]} * double{w.f32()[v * 4 + k]};
      return z;
    };
    int64_t largest = 0;
    for (int64_t v = 1; v < kVocab; ++v) largest = logit(v) > logit(largest) ? v : largest;
    if (i % 3 == 0 && targets.i32()[i] >= 0) targets.i32()[i] = static_cast<int32_t>(largest);
    expected[static_cast<size_t>(i)] = targets.i32()[i] == largest ? 1 : 0;
  }
  const Owned loss = test::poisoned({kTokens});
  const Owned hits = test::poisoned({kTokens});
  ops::run(s, ops::CrossEntropy{
                  .loss_T = loss, .hits_T = hits, .x_TD = x, .w_VD = w, .targets_T = targets});
  EXPECT_EQ(test::to_f64(hits), expected);
}

TEST(CrossEntropy, LargeLogitsStayFiniteAndNanIsSeen) {
  CpuStream s;
  Owned x = test::constant({2, 1}, 1e4);
  const Owned w = test::generated({3, 1}, 0, [](int64_t i) { return static_cast<double>(i - 1); });
  const Owned loss = test::poisoned({2});
  const Owned targets = test::integers({2, 0});
  const ops::CrossEntropy t{.loss_T = loss, .x_TD = x, .w_VD = w, .targets_T = targets};
  ops::run(s, t);
  EXPECT_EQ(test::to_f64(loss), (Values{0, 2e4}));
  x.at(1, 0) = std::nanf("");
  ops::run(s, t);
  EXPECT_EQ(loss.f32()[0], 0.0f);
  EXPECT_TRUE(std::isnan(loss.f32()[1]));
}

TEST(CrossEntropy, SameBitsOnEveryRunAndBadTargetsAreRefused) {
  CpuStream s;
  const Owned x = test::random_normal("x", {300, 40});
  const Owned w = test::random_normal("w", {1000, 40});
  const Owned targets = some_targets(300, 1000);
  const auto run = [&] {
    const Owned loss = test::poisoned({300});
    const Owned dx = test::poisoned({300, 40});
    Owned dw = test::constant({1000, 40}, 0);
    ops::run(
        s,
        ops::CrossEntropy{
            .loss_T = loss, .dx_TD = dx, .dw_VD = dw, .x_TD = x, .w_VD = w, .targets_T = targets});
    return std::array<Owned, 3>{loss, dx, dw};
  };
  const auto first = run();
  for (int i = 0; i < 5; ++i) {
    const auto again = run();
    for (size_t k = 0; k < 3; ++k) EXPECT_TRUE(test::bitwise_equal(first[k], again[k]));
  }
  targets.i32()[7] = 1000;
  EXPECT_THROW(run(), Error);
}

}  // namespace
}  // namespace sbtrain
