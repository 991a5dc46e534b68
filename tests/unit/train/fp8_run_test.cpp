// Runs whose products are in emulated fp8, in several worlds and modes.
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "support/optimizer_runs.h"
#include "support/process.h"

namespace sbtrain::test {
namespace {

// Every matrix of a block has sizes that fp8 takes.
Config config(const std::string& train) {
  Config c = optimizer_config(train);
  c.model.width = 32;
  c.model.inner = 48;
  c.model.init_std = 0.1;
  return c;
}

const Config& fp8() {
  static const Config c = config("precision: fp8");
  return c;
}

// The mean of losses [first, last).
double mean(const OptimizerResult& run, int first, int last) {
  return std::accumulate(run.losses.begin() + first, run.losses.begin() + last, 0.0) /
         (last - first);
}

// An element of e4m3 is off by some per cent, and AdamW's first updates are the signs of gradients,
// of which the smallest turn over: single losses of the first steps differ by several per cent. The
// errors of elements are independent, and so the course of training is f32's.
TEST(Fp8Run, LearnsLikeF32) {
  const OptimizerResult f32 = run_optimizer(config(""), {.last = 40});
  const OptimizerResult run = run_optimizer(fp8(), {.last = 40});
  EXPECT_NE(run.losses, f32.losses);
  EXPECT_NEAR(run.losses[0], f32.losses[0], 0.01 * f32.losses[0]);
  EXPECT_LT(mean(run, 20, 40), 0.95 * run.losses[0]);
  EXPECT_NEAR(mean(run, 20, 40), mean(f32, 20, 40), 0.01 * mean(f32, 20, 40));
}

class Fp8Worlds : public testing::TestWithParam<OptimizerRun> {};

// Ranks share sequences: the gradients of micro-batches are the same, their sums in another order.
TEST_P(Fp8Worlds, TrainLikeOneRank) {
  OptimizerRun run = GetParam();
  run.last = 10;
  const OptimizerResult one = run_optimizer(fp8(), {.last = 10});
  const OptimizerResult many = run_optimizer(fp8(), run);
  for (size_t i = 0; i < one.losses.size(); ++i) {
    EXPECT_NEAR(many.losses[i], one.losses[i], 5e-3 * one.losses[i]) << i;
  }
}

TEST_P(Fp8Worlds, ResumeBitForBit) {
  const TemporaryFolder saved;
  OptimizerRun straight = GetParam(), head = GetParam(), rest = GetParam();
  straight.last = 4;
  head.last = 2;
  head.to = saved.path();
  run_optimizer(fp8(), head);
  rest.first = 2;
  rest.last = 4;
  rest.from = saved.path();
  EXPECT_EQ(run_optimizer(fp8(), rest).tensors, run_optimizer(fp8(), straight).tensors);
}

TEST_P(Fp8Worlds, ThePlannedPoolGivesTheSameBits) {
  OptimizerRun run = GetParam(), planned = GetParam();
  run.last = planned.last = 3;
  planned.planned = true;
  EXPECT_EQ(run_optimizer(fp8(), planned).tensors, run_optimizer(fp8(), run).tensors);
}

TEST_P(Fp8Worlds, ASkippedStepChangesNothing) {
  OptimizerRun run = GetParam(), skipped = GetParam();
  run.last = 1;
  skipped.last = 2;
  skipped.bad_step = 1;
  EXPECT_EQ(run_optimizer(fp8(), skipped).tensors, run_optimizer(fp8(), run).tensors);
}

INSTANTIATE_TEST_SUITE_P(
    Worlds, Fp8Worlds,
    testing::Values(OptimizerRun{}, OptimizerRun{.world = 2},
                    OptimizerRun{.sharding = Sharding::kGrad, .world = 2},
                    OptimizerRun{.sharding = Sharding::kNone, .world = 2},
                    OptimizerRun{.sharding = Sharding::kHybrid, .world = 4, .node_size = 2}),
    [](const auto& info) {
      return fmt::format("{}{}", name_of(info.param.sharding), info.param.world);
    });

}  // namespace
}  // namespace sbtrain::test
