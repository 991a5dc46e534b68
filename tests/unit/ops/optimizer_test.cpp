#include "ops/optimizer.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <array>
#include <cmath>

#include "core/error.h"
#include "support/tensors.h"

namespace sbtrain {
namespace {

using test::CpuStream;
using test::Owned;
using Values = std::vector<double>;

double squared_norm(Stream& s, const Tensor& x) {
  double value = 0;
  ops::run(s, ops::AddSquaredNorm{.y_1 = Tensor(&value, DType::kF64, {1}), .x = x});
  return value;
}

// The statistics of a step that FinishStep has accepted.
struct Stats {
  std::array<double, ops::kStepStats> values{};
  Tensor tensor{values.data(), DType::kF64, {ops::kStepStats}};
};
void count_updates(Stats& stats, double updates, double grad_scale = 1) {
  stats.values[ops::kUpdates] = updates;
  stats.values[ops::kApply] = 1;
  stats.values[ops::kGradScale] = grad_scale;
  stats.values[ops::kBias1] = 1 - std::pow(0.9f, updates);
  stats.values[ops::kBias2] = 1 - std::pow(0.95f, updates);
}

TEST(SquaredNorm, MatchesReferenceForEverySizeAndThreadCount) {
  CpuStream s;
  const int threads_before = omp_get_max_threads();
  for (const int64_t n : {1, 7, 16384, 16385, 300001}) {
    const Owned x = test::random_normal("x", {n}, 1, 0.1);
    double squares = 0;
    double total = 0;
    for (const double v : test::to_f64(x)) {
      squares += v * v;
      total += v;
    }
    omp_set_num_threads(1);
    const double norm = squared_norm(s, x);
    const double sum = ops::sum(s, x);
    EXPECT_NEAR(norm, squares, 1e-12 * squares);
    EXPECT_NEAR(sum, total, 1e-12 * squares);
    for (const int threads : {2, 5, 16}) {
      omp_set_num_threads(threads);
      EXPECT_EQ(squared_norm(s, x), norm);
      EXPECT_EQ(ops::sum(s, x), sum);
    }
  }
  omp_set_num_threads(threads_before);
}

TEST(SquaredNorm, StridedViewsAndNonFiniteInput) {
  CpuStream s;
  Owned x = test::random_normal("x", {50, 33}, 1, 0, 4);
  double squares = 0;
  for (const double v : test::to_f64(x)) squares += v * v;
  EXPECT_NEAR(squared_norm(s, x), squares, 1e-12 * squares);
  x.at(20, 5) = std::nanf("");
  EXPECT_TRUE(std::isnan(squared_norm(s, x)));
  x.at(20, 5) = INFINITY;
  EXPECT_TRUE(std::isinf(squared_norm(s, x)));
  EXPECT_EQ(squared_norm(s, test::constant({4}, 1e30)), 4 * std::pow(double{1e30f}, 2));
}

TEST(AdamW, MatchesAScalarReference) {
  CpuStream s;
  constexpr int64_t kCount = 40001;
  const Owned w = test::random_normal("w", {kCount});
  const Owned m = test::constant({kCount}, 0);
  const Owned v = test::constant({kCount}, 0);
  Values W = test::to_f64(w);
  Values M(kCount);
  Values V(kCount);
  Stats stats;
  const std::vector<ops::DecayRange> all = {{0, kCount}};
  ops::AdamW t{.w_N = w, .m_N = m, .v_N = v, .grad_N = {}, .stats = stats.tensor, .decays = all};
  t.lr = 0.01f;
  t.decay = 0.1f;
  for (int step = 1; step <= 5; ++step) {
    const Owned grad = test::random_normal("grad" + std::to_string(step), {kCount}, 0.3);
    t.grad_N = grad;
    count_updates(stats, step, 0.5);
    ops::run(s, t);
    const Values G = test::to_f64(grad);
    const double m_bias = 1 - std::pow(0.9, step);
    const double v_bias = 1 - std::pow(0.95, step);
    for (size_t i = 0; i < W.size(); ++i) {
      const double g = 0.5 * G[i];
      M[i] = 0.9 * M[i] + 0.1 * g;
      V[i] = 0.95 * V[i] + 0.05 * g * g;
      const double m_hat = M[i] / m_bias;
      const double v_hat = V[i] / v_bias;
      W[i] -= 0.01 * (m_hat / (std::sqrt(v_hat) + 1e-8) + 0.1 * W[i]);
    }
    EXPECT_LE(test::relative_error(w, W), 1e-6);
    EXPECT_LE(test::relative_error(m, M), 1e-6);
    EXPECT_LE(test::relative_error(v, V), 1e-6);
  }
}

// Zero-padded elements of weights must stay zero through training.
TEST(AdamW, ZeroWeightsWithZeroGradientsStayZero) {
  CpuStream s;
  const Owned zero = test::constant({10}, 0);
  const Owned w = test::constant({10}, 0);
  const Owned m = test::constant({10}, 0);
  const Owned v = test::constant({10}, 0);
  Stats stats;
  count_updates(stats, 1);
  const std::vector<ops::DecayRange> all = {{0, 10}};
  ops::run(s, ops::AdamW{.w_N = w,
                         .m_N = m,
                         .v_N = v,
                         .grad_N = zero,
                         .stats = stats.tensor,
                         .decays = all,
                         .lr = 0.1f,
                         .decay = 0.1f});
  EXPECT_TRUE(test::bitwise_equal(w, zero));
}

TEST(AdamW, LateStepsNeedNoCorrection) {
  CpuStream s;
  const Owned w = test::constant({3}, 1);
  const Owned m = test::constant({3}, 0.5);
  const Owned v = test::constant({3}, 0.25);
  const Owned grad = test::constant({3}, 0.5);
  Stats stats;
  count_updates(stats, 1000000);
  ops::run(s,
           ops::AdamW{
               .w_N = w, .m_N = m, .v_N = v, .grad_N = grad, .stats = stats.tensor, .lr = 0.125f});
  for (const double value : test::to_f64(w)) EXPECT_NEAR(value, 0.875, 1e-6);
}

TEST(AdamW, DecaysItsRangesOnlyAndWritesTheComputeCopy) {
  CpuStream s;
  const Owned w = test::constant({8}, 1);
  const Owned zero = test::constant({8}, 0);
  const Owned m = test::constant({8}, 0);
  const Owned v = test::constant({8}, 0);
  const Owned compute = test::poisoned({8});
  Stats stats;
  count_updates(stats, 1);
  const std::vector<ops::DecayRange> some = {{1, 3}, {6, 8}};
  ops::AdamW t{.w_N = w, .m_N = m, .v_N = v, .grad_N = zero, .compute_N = compute};
  t.stats = stats.tensor;
  t.decays = some;
  t.lr = 0.5f;
  t.decay = 0.5f;
  ops::run(s, t);
  EXPECT_EQ(test::to_f64(w), (Values{1, 0.75, 0.75, 1, 1, 1, 0.75, 0.75}));
  EXPECT_TRUE(test::bitwise_equal(compute, w));
  const std::vector<ops::DecayRange> overlapping = {{1, 3}, {2, 8}};
  t.decays = overlapping;
  EXPECT_THROW(ops::run(s, t), Error);
}

TEST(FinishStep, ClipsCountsAndSkips) {
  CpuStream s;
  Stats stats;
  stats.values = {3.0, 16.0, 1.0};  // loss, squared norm, valid targets
  ops::run(s, ops::FinishStep{.stats = stats.tensor, .clip = 1.0, .beta1 = 0.9, .beta2 = 0.95});
  EXPECT_EQ(stats.values[ops::kApply], 1);
  EXPECT_EQ(stats.values[ops::kUpdates], 1);
  EXPECT_EQ(stats.values[ops::kGradScale], 0.25);
  EXPECT_EQ(stats.values[ops::kBias1], 1 - 0.9);
  ops::run(s, ops::FinishStep{.stats = stats.tensor, .clip = 0.0, .beta1 = 0.9, .beta2 = 0.95});
  EXPECT_EQ(stats.values[ops::kGradScale], 1);
  EXPECT_EQ(stats.values[ops::kBias2], 1 - std::pow(0.95, 2));
  // The gradients are those of a sum over 8 targets: the mean's have a norm of 0.5, then 2.
  stats.values[ops::kValidTargets] = 8;
  for (const auto& [squares, scale] : {std::pair{16.0, 1.0 / 8}, {256.0, 0.5 / 8}}) {
    stats.values[ops::kSquaredNorm] = squares;
    stats.values[ops::kUpdates] = 1;
    ops::run(s, ops::FinishStep{.stats = stats.tensor, .clip = 1.0, .beta1 = 0.9, .beta2 = 0.95});
    EXPECT_EQ(stats.values[ops::kGradScale], scale);
  }
  // A step with NaN or infinity is not counted, and nothing changes.
  const Owned w = test::constant({3}, 1);
  const Owned grad = test::constant({3}, std::nanf(""));
  for (const double bad : {std::nan(""), static_cast<double>(INFINITY)}) {
    stats.values[ops::kSquaredNorm] = bad;
    ops::run(s, ops::FinishStep{.stats = stats.tensor, .clip = 1.0, .beta1 = 0.9, .beta2 = 0.95});
    EXPECT_EQ(stats.values[ops::kApply], 0);
    EXPECT_EQ(stats.values[ops::kUpdates], 2);
    ops::run(s, ops::AdamW{
                    .w_N = w, .m_N = w, .v_N = w, .grad_N = grad, .stats = stats.tensor, .lr = 1});
    EXPECT_EQ(test::to_f64(w), (Values{1, 1, 1}));
  }
}

// Against the plain formulas of mean and variance in the warm-up, and the recurrence afterwards.
TEST(FinishStep, SkipsSpikesOfTheLoss) {
  CpuStream s;
  Stats stats;
  constexpr double kTargets = 8;
  constexpr int kWindow = 5;
  ops::FinishStep op{.stats = stats.tensor, .clip = 1.0, .beta1 = 0.9, .beta2 = 0.95};
  op.spike_sigma = 3;
  op.spike_window = kWindow;
  const auto finish = [&](double loss) {
    stats.values[ops::kLossSum] = loss * kTargets;
    stats.values[ops::kSquaredNorm] = 1;
    stats.values[ops::kValidTargets] = kTargets;
    ops::run(s, op);
    EXPECT_EQ(stats.values[ops::kApply], std::isfinite(loss) ? 1 - stats.values[ops::kSpike] : 0);
    return stats.values[ops::kSpike] == 1;
  };
  double mean = 0;
  double variance = 0;
  std::vector<double> losses = {4.0, 9.0, 3.5, 3.0, 5.0};  // the second is no spike in the warm-up
  for (const double loss : losses) EXPECT_FALSE(finish(loss));
  for (const double loss : losses) mean += loss / kWindow;
  for (const double loss : losses) variance += (loss - mean) * (loss - mean) / kWindow;
  EXPECT_EQ(stats.values[ops::kLossCount], kWindow);
  EXPECT_NEAR(stats.values[ops::kLossMean], mean, 1e-14);
  EXPECT_NEAR(stats.values[ops::kLossVariance], variance, 1e-14);
  for (const double deviations : {2.9, -20.0, 2.9, 0.0}) {
    // Beyond the bound: skipped, however often, and not counted.
    const std::array<double, ops::kStepStats> before = stats.values;
    for (int i = 0; i < 3; ++i) {
      EXPECT_TRUE(finish(mean + 3.1 * std::sqrt(variance)));
      for (const int kept : {ops::kUpdates, ops::kLossCount, ops::kLossMean, ops::kLossVariance}) {
        EXPECT_EQ(stats.values[kept], before[kept]);
      }
    }
    const double loss = mean + deviations * std::sqrt(variance);
    EXPECT_FALSE(finish(loss));
    variance = (1 - 1.0 / kWindow) * (variance + (loss - mean) * (loss - mean) / kWindow);
    mean += (loss - mean) / kWindow;
    EXPECT_NEAR(stats.values[ops::kLossMean], mean, 1e-15 * std::abs(mean));
    EXPECT_NEAR(stats.values[ops::kLossVariance], variance, 1e-15 * variance);
  }
  EXPECT_FALSE(finish(std::nan("")));  // bad, but not a spike
  op.spike_sigma = 0;
  EXPECT_FALSE(finish(1e9));
}

}  // namespace
}  // namespace sbtrain
