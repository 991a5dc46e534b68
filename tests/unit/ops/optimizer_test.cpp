#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>

#include "core/error.h"
#include "ops/ops.h"
#include "support/tensors.h"

namespace sbtrain {
namespace {

using test::CpuStream;
using test::Owned;
using Values = std::vector<double>;

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
    const double norm = ops::squared_norm(s, x);
    const double sum = ops::sum(s, x);
    EXPECT_NEAR(norm, squares, 1e-12 * squares);
    EXPECT_NEAR(sum, total, 1e-12 * squares);
    for (const int threads : {2, 5, 16}) {
      omp_set_num_threads(threads);
      EXPECT_EQ(ops::squared_norm(s, x), norm);
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
  EXPECT_NEAR(ops::squared_norm(s, x), squares, 1e-12 * squares);
  x.at(20, 5) = std::nanf("");
  EXPECT_TRUE(std::isnan(ops::squared_norm(s, x)));
  x.at(20, 5) = INFINITY;
  EXPECT_TRUE(std::isinf(ops::squared_norm(s, x)));
  EXPECT_EQ(ops::squared_norm(s, test::constant({4}, 1e30)), 4 * std::pow(double{1e30f}, 2));
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
  ops::AdamW t{.w_N = w, .m_N = m, .v_N = v, .grad_N = {}};
  t.lr = 0.01f;
  t.decay = 0.1f;
  for (int step = 1; step <= 5; ++step) {
    const Owned grad = test::random_normal("grad" + std::to_string(step), {kCount}, 0.3);
    t.grad_N = grad;
    t.grad_scale = 0.5f;
    t.step = step;
    ops::adamw(s, t);
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
  ops::adamw(s, {.w_N = w, .m_N = m, .v_N = v, .grad_N = zero, .lr = 0.1f, .decay = 0.1f});
  EXPECT_TRUE(test::bitwise_equal(w, zero));
}

TEST(AdamW, LateStepsNeedNoCorrectionAndStepsCountFromOne) {
  CpuStream s;
  const Owned w = test::constant({3}, 1);
  const Owned m = test::constant({3}, 0.5);
  const Owned v = test::constant({3}, 0.25);
  const Owned grad = test::constant({3}, 0.5);
  ops::AdamW t{.w_N = w, .m_N = m, .v_N = v, .grad_N = grad, .lr = 0.125f};
  t.step = 1000000;
  ops::adamw(s, t);
  for (const double value : test::to_f64(w)) EXPECT_NEAR(value, 0.875, 1e-6);
  t.step = 0;
  EXPECT_THROW(ops::adamw(s, t), Error);
}

}  // namespace
}  // namespace sbtrain
