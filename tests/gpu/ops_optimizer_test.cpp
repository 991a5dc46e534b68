#include <gtest/gtest.h>

#include <cmath>
#include <memory>

#include "core/error.h"
#include "gpu/op_test.h"
#include "kernels/optimizer.h"
#include "ops/cuda/context.h"
#include "ops/memory.h"
#include "ops/optimizer.h"

namespace sbtrain::optimizer_test {
namespace {

using test::OnGpu;
using test::Owned;
using Optimizer = test::GpuOpTest;
using Values = std::vector<double>;

constexpr DType kF32 = DType::kF32;
constexpr DType kF64 = DType::kF64;

// Writes f64 values to a tensor on the GPU.
void set(test::GpuStream& s, const Tensor& x, const Values& values) {
  ops::run(s, ops::CopyFromHost{.y = x, .host = values.data()});
}

TEST_F(Optimizer, SumsMatchFp64AndRepeat) {
  struct Case {
    int64_t rows, cols, gap;
  };
  for (const Case& c :
       {Case{1, 1, 0}, {1, 7, 0}, {50, 33, 4}, {50, 32, 4}, {1, 300001, 0}, {3, 2000000, 0}}) {
    const Owned x = test::random_normal("x", {c.rows, c.cols}, 1, 0.1);
    double total = 0;
    double squares = 0;
    for (const double v : test::to_f64(x)) {
      total += v;
      squares += v * v;
    }
    const OnGpu x_gpu(gpu(), x, kF32, c.gap);
    std::vector<uint8_t> first;
    for (int run = 0; run < 3; ++run) {
      const OnGpu sums(gpu(), kF64, {2});
      set(gpu(), sums, {5.0, 7.0});
      ops::run(gpu(), ops::AddSum{.y_1 = Tensor(sums.tensor().f64(), kF64, {1}), .x = x_gpu});
      ops::run(gpu(),
               ops::AddSquaredNorm{.y_1 = Tensor(sums.tensor().f64() + 1, kF64, {1}), .x = x_gpu});
      const Values values = sums.values();
      EXPECT_NEAR(values[0], 5 + total, 1e-12 * (squares + 12));
      EXPECT_NEAR(values[1], 7 + squares, 1e-12 * (squares + 12));
      if (run == 0) first = sums.raw();
      EXPECT_EQ(sums.raw(), first);
    }
    EXPECT_NEAR(ops::sum(gpu(), x_gpu), total, 1e-12 * (squares + 12));
  }
}

TEST_F(Optimizer, NonFiniteElementsShow) {
  Owned x = test::random_normal("x", {10, 1000});
  for (const float bad : {std::nanf(""), INFINITY}) {
    x.at(7, 77) = bad;
    const OnGpu norm(gpu(), kF64, {1});
    set(gpu(), norm, {0});
    ops::run(gpu(), ops::AddSquaredNorm{.y_1 = norm, .x = OnGpu(gpu(), x, kF32)});
    EXPECT_FALSE(std::isfinite(norm.values()[0]));
  }
}

TEST_F(Optimizer, FinishStepIsThatOfTheCpu) {
  const double inf = INFINITY;
  const OnGpu stats(gpu(), kF64, {ops::kStepStats});
  Values expected(ops::kStepStats, 0.0);
  set(gpu(), stats, expected);
  for (const auto& [loss, squares, targets, clip] : {std::tuple{3.0, 16.0, 1.0, 1.0},
                                                     {3.0, 16.0, 7.0, 0.0},
                                                     {2.0, 0.25, 1.0, 1.0},
                                                     {std::nan(""), 1.0, 1.0, 1.0},
                                                     {1.0, inf, 1.0, 1.0},
                                                     {1.0, std::nan(""), 1.0, 1.0},
                                                     {0.0, 0.0, 0.0, 1.0},
                                                     {8e5, 1e12, 65536.0, 2.0},
                                                     {8e5, 1e11, 65536.0, 2.0}}) {
    Values values = stats.values();
    for (Values* v : {&values, &expected}) {
      (*v)[ops::kLossSum] = loss;
      (*v)[ops::kSquaredNorm] = squares;
      (*v)[ops::kValidTargets] = targets;
    }
    set(gpu(), stats, values);
    ops::run(gpu(), ops::FinishStep{.stats = stats, .clip = clip, .beta1 = 0.9, .beta2 = 0.95});
    ops::run(cpu, ops::FinishStep{.stats = Tensor(expected.data(), kF64, {ops::kStepStats}),
                                  .clip = clip,
                                  .beta1 = 0.9,
                                  .beta2 = 0.95});
    values = stats.values();
    EXPECT_EQ(values[ops::kUpdates], expected[ops::kUpdates]);
    EXPECT_EQ(values[ops::kApply], expected[ops::kApply]);
    if (expected[ops::kApply] == 0) continue;
    for (const int i : {ops::kGradScale, ops::kBias1, ops::kBias2}) {
      EXPECT_NEAR(values[i], expected[i], 1e-14);
    }
  }
}

TEST_F(Optimizer, SpikesAreThoseOfTheCpu) {
  const OnGpu stats(gpu(), kF64, {ops::kStepStats});
  Values expected(ops::kStepStats, 0.0);
  set(gpu(), stats, expected);
  for (const double loss : {4.0, 9.0, 3.5, 3.0, 5.0, 20.0, 4.5, std::nan(""), 30.0, 2.0, 11.0}) {
    Values values = stats.values();
    for (Values* v : {&values, &expected}) {
      (*v)[ops::kLossSum] = loss * 64;
      (*v)[ops::kSquaredNorm] = 1;
      (*v)[ops::kValidTargets] = 64;
    }
    set(gpu(), stats, values);
    ops::FinishStep op{.stats = stats, .clip = 1.0, .beta1 = 0.9, .beta2 = 0.95};
    op.spike_sigma = 2;
    op.spike_window = 5;
    ops::run(gpu(), op);
    op.stats = Tensor(expected.data(), kF64, {ops::kStepStats});
    ops::run(cpu, op);
    values = stats.values();
    for (const int i : {ops::kApply, ops::kSpike, ops::kUpdates, ops::kLossCount}) {
      EXPECT_EQ(values[i], expected[i]) << loss;
    }
    for (const int i : {ops::kLossMean, ops::kLossVariance}) {
      EXPECT_NEAR(values[i], expected[i], 1e-13) << loss;
    }
  }
  EXPECT_GE(expected[ops::kUpdates], 5);
  EXPECT_LT(expected[ops::kUpdates], 10);  // some were skipped
}

// More arrays than one launch takes, and one whose size does not suit vectors.
TEST_F(Optimizer, NormsOfManyHaveTheBitsOfOneByOne) {
  std::vector<std::unique_ptr<OnGpu>> arrays;
  for (int i = 0; i < 2 * kernels::kMaxNormParts + 3; ++i) {
    const int64_t n = i == 5 ? 1003 : 64 * (i + 1) * (i + 1);
    const Owned x = test::random_normal("x", {1, n}, 1, static_cast<double>(i + 1));
    arrays.push_back(std::make_unique<OnGpu>(gpu(), x, kF32));
  }
  const OnGpu norms(gpu(), kF64, {2});
  set(gpu(), norms, {3.0, 3.0});
  const auto sum = [&](int i) { return Tensor(norms.tensor().f64() + i, kF64, {1}); };
  std::vector<Tensor> all;
  for (const auto& x : arrays) {
    all.push_back(*x);
    ops::run(gpu(), ops::AddSquaredNorm{.y_1 = sum(0), .x = *x});
  }
  ops::run(gpu(), ops::AddSquaredNorms{.y_1 = sum(1), .x = all});
  const Values values = norms.values();
  EXPECT_GT(values[0], 3.0);
  EXPECT_EQ(values[0], values[1]);
}

struct Update {
  Owned w, m, v;
};

// More ranges than one launch takes, of which some have more parts with decay than that, and sizes
// that do not suit vectors.
TEST_F(Optimizer, AdamWOfManyHasTheBitsOfOneByOne) {
  const OnGpu stats(gpu(), kF64, {ops::kStepStats});
  Values numbers(ops::kStepStats, 0.0);
  numbers[ops::kGradScale] = 0.5;
  numbers[ops::kBias1] = 0.1;
  numbers[ops::kBias2] = 0.05;
  numbers[ops::kApply] = 1;
  set(gpu(), stats, numbers);
  struct Range {
    OnGpu w, m, v, grad, compute;
    std::vector<ops::DecayRange> decays;
  };
  const auto make = [&](int i) {
    const int64_t n = i == 7 ? 1003 : 4096 + 64 * i;
    const auto values = [&](const char* name) { return test::random_normal(name, {n}, 0.5, 1); };
    auto range = std::make_unique<Range>(Range{OnGpu(gpu(), values("w"), kF32),
                                               OnGpu(gpu(), values("m"), kF32),
                                               OnGpu(gpu(), test::constant({n}, 0.25), kF32),
                                               OnGpu(gpu(), values("grad"), kF32),
                                               OnGpu(gpu(), DType::kBF16, {n}),
                                               {}});
    const int decays = i == 3 ? 2 * kernels::kMaxDecaySegments + 1 : i % 9;
    for (int64_t d = 0; d < decays; ++d) range->decays.push_back({7 * d, 7 * d + 3});
    return range;
  };
  std::vector<std::unique_ptr<Range>> together, alone;
  std::vector<ops::AdamW> all;
  for (int i = 0; i < 2 * kernels::kMaxAdamWParts + 3; ++i) {
    for (auto* ranges : {&together, &alone}) {
      ranges->push_back(make(i));
      Range& range = *ranges->back();
      const ops::AdamW op{.w_N = range.w,
                          .m_N = range.m,
                          .v_N = range.v,
                          .grad_N = range.grad,
                          .compute_N = range.compute,
                          .stats = stats,
                          .decays = range.decays,
                          .lr = 0.1f,
                          .decay = 0.2f};
      if (ranges == &together) {
        all.push_back(op);
      } else {
        ops::run(gpu(), op);
      }
    }
  }
  ops::run(gpu(), ops::AdamWs{.ranges = all});
  for (size_t i = 0; i < alone.size(); ++i) {
    EXPECT_EQ(together[i]->w.raw(), alone[i]->w.raw()) << i;
    EXPECT_EQ(together[i]->m.raw(), alone[i]->m.raw()) << i;
    EXPECT_EQ(together[i]->v.raw(), alone[i]->v.raw()) << i;
    EXPECT_EQ(together[i]->compute.raw(), alone[i]->compute.raw()) << i;
  }
}

TEST_F(Optimizer, AdamWMatchesTheCpu) {
  for (const int64_t n : {3, 5, 8, 1024, 40003}) {
    const Update host{test::random_normal("w", {n}), test::constant({n}, 0),
                      test::constant({n}, 0)};
    const OnGpu w(gpu(), host.w, kF32);
    const OnGpu m(gpu(), host.m, kF32);
    const OnGpu v(gpu(), host.v, kF32);
    const OnGpu compute(gpu(), DType::kBF16, {n});
    const OnGpu stats_gpu(gpu(), kF64, {ops::kStepStats});
    // Ranges that do not begin or end on boundaries of 16 bytes, and an empty one.
    const std::vector<ops::DecayRange> decays = {
        {0, n / 7}, {n / 7 + 1, n / 3}, {n / 2, n / 2}, {n / 2 + 1, n}};
    for (int step = 1; step <= 4; ++step) {
      const Owned grad = test::random_normal("grad" + std::to_string(step), {n}, 0.3);
      const OnGpu grad_gpu(gpu(), grad, kF32);
      Values stats(ops::kStepStats);
      stats[ops::kUpdates] = step;
      stats[ops::kApply] = 1;
      stats[ops::kGradScale] = 0.5;
      stats[ops::kBias1] = 1 - std::pow(0.9, step);
      stats[ops::kBias2] = 1 - std::pow(0.95, step);
      set(gpu(), stats_gpu, stats);
      ops::AdamW t{.w_N = host.w, .m_N = host.m, .v_N = host.v, .grad_N = grad, .decays = decays};
      t.stats = Tensor(stats.data(), kF64, {ops::kStepStats});
      t.lr = 0.01f;
      t.decay = 0.1f;
      ops::run(cpu, t);
      t.w_N = w;
      t.m_N = m;
      t.v_N = v;
      t.grad_N = grad_gpu;
      t.compute_N = compute;
      t.stats = stats_gpu;
      ops::run(gpu(), t);
      EXPECT_LE(test::relative_error(w, host.w), 1e-6) << n;
      EXPECT_LE(test::relative_error(m, host.m), 1e-6) << n;
      EXPECT_LE(test::relative_error(v, host.v), 1e-6) << n;
      EXPECT_EQ(grad_gpu.values(), test::to_f64(grad));
      Values rounded = w.values();
      for (double& x : rounded) x = test::from_bf16(test::to_bf16(static_cast<float>(x)));
      EXPECT_EQ(compute.values(), rounded);
    }
  }
}

TEST_F(Optimizer, SkippedStepsChangeNothing) {
  const Owned one = test::constant({100}, 1);
  const OnGpu w(gpu(), one, kF32);
  const OnGpu m(gpu(), one, kF32);
  const OnGpu v(gpu(), one, kF32);
  const OnGpu grad(gpu(), test::constant({100}, std::nan("")), kF32);
  const OnGpu compute(gpu(), one, DType::kBF16);
  const OnGpu stats(gpu(), kF64, {ops::kStepStats});
  set(gpu(), stats, Values(ops::kStepStats, 0.0));
  ops::run(gpu(), ops::AdamW{.w_N = w,
                             .m_N = m,
                             .v_N = v,
                             .grad_N = grad,
                             .compute_N = compute,
                             .stats = stats,
                             .lr = 1});
  for (const OnGpu* x : {&w, &m, &v, &compute}) EXPECT_EQ(x->values(), Values(100, 1.0));
}

// More ranges with weight decay than one launch takes.
TEST_F(Optimizer, DecaysAnyNumberOfRanges) {
  constexpr int64_t kElements = 1000;
  std::vector<ops::DecayRange> decays;
  for (int64_t i = 0; i < 3 * kernels::kMaxDecaySegments; ++i) decays.push_back({5 * i, 5 * i + 2});
  const Owned one = test::constant({kElements}, 1);
  const OnGpu w(gpu(), one, kF32);
  const OnGpu m(gpu(), test::constant({kElements}, 0), kF32);
  const OnGpu v(gpu(), test::constant({kElements}, 0), kF32);
  const OnGpu grad(gpu(), test::constant({kElements}, 0), kF32);
  const OnGpu compute(gpu(), one, DType::kBF16);
  const OnGpu stats(gpu(), kF64, {ops::kStepStats});
  set(gpu(), stats, Values(ops::kStepStats, 1.0));
  ops::run(gpu(), ops::AdamW{.w_N = w,
                             .m_N = m,
                             .v_N = v,
                             .grad_N = grad,
                             .compute_N = compute,
                             .stats = stats,
                             .decays = decays,
                             .lr = 1,
                             .decay = 0.5f});
  for (int64_t i = 0; i < kElements; ++i) {
    const bool decayed = i / 5 < 3 * kernels::kMaxDecaySegments && i % 5 < 2;
    EXPECT_EQ(w.values()[i], decayed ? 0.5 : 1.0) << i;
    EXPECT_EQ(compute.values()[i], decayed ? 0.5 : 1.0) << i;
  }
}

}  // namespace
}  // namespace sbtrain::optimizer_test
