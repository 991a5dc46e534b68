// Runs whose products are in emulated fp8, in several worlds and modes.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "config/schema.h"
#include "parallel/traffic.h"
#include "support/optimizer_runs.h"
#include "support/process.h"
#include "train/scale.h"

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

// The losses of steps on the same sequences again and again, which a model learns by heart.
std::vector<double> learn(const Config& config, int steps, uint64_t seed = 3) {
  const std::unique_ptr<Communicator> alone = make_single_process();
  const Mesh mesh(*alone);
  const Transformer model(config.model, config.train.recompute);
  Memory memory(Backend::kCpu);
  memory.poison();
  Stream stream(memory);
  TrainStep step(config, model, stream, mesh);
  step.params().initialize(seed);
  std::vector<PackedBatch> batches;
  for (int m = 0; m < config.train.batch; ++m) {
    batches.push_back(packed_batch({5, 11}, config.model.vocab, static_cast<uint64_t>(m)));
  }
  std::vector<double> losses;
  for (int n = 0; n < steps; ++n) losses.push_back(step.run(batches, 1e-2).wait().loss);
  return losses;
}

// The mean of several initialisations: one run learns in jerks of up to 4% of its first loss, which
// move with every rounding, and so with the processor.
std::vector<double> learn_on_average(const Config& config, int steps) {
  constexpr int kSeeds = 8;
  std::vector<double> mean(static_cast<size_t>(steps));
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    const std::vector<double> losses = learn(config, steps, seed);
    for (size_t n = 0; n < losses.size(); ++n) mean[n] += losses[n] / kSeeds;
  }
  return mean;
}

// An element of e4m3 is off by some per cent, but their errors are independent.
TEST(Fp8Run, LearnsLikeF32) {
  constexpr int kSteps = 60;
  const std::vector<double> f32 = learn_on_average(config(""), kSteps);
  const std::vector<double> run = learn_on_average(fp8(), kSteps);
  EXPECT_NE(run, f32);
  EXPECT_NEAR(run[0], f32[0], 0.002 * f32[0]);
  EXPECT_LT(run.back(), 0.3 * run[0]);
  for (int n = 0; n < kSteps; ++n) EXPECT_NEAR(run[n], f32[n], 0.02 * f32[0]) << n;
}

TEST(Fp8Run, RecomputationGivesTheSameBits) {
  const std::vector<double> kept = learn(fp8(), 3);
  for (const char* recompute : {"selective", "full"}) {
    EXPECT_EQ(learn(config(fmt::format("precision: fp8, recompute: {}", recompute)), 3), kept);
  }
}

// A model of the proportions of configs/1b_sb.yaml, for plans.
Config large(const std::string& train) {
  Config c = optimizer_config(train);
  c.model.layers = 4;
  c.model.width = 1024;
  c.model.inner = 2816;
  c.model.heads = c.model.kv_heads = 16;
  c.model.vocab = 32000;
  c.train.sequence_length = 4096;
  c.train.micro_batch = 2;
  return c;
}

struct PlannedStep {
  size_t bytes;  // of memory
  Traffic traffic;
};

PlannedStep plan_step(const Config& config, Sharding sharding, int world, int node_size) {
  Traffic traffic;
  const auto ranks = make_planned(0, world, node_size, &traffic);
  const Mesh mesh(*ranks, sharding, node_size);
  const Transformer model(config.model, config.train.recompute, mesh.shard_count());
  Memory memory = Memory::planning(Backend::kCuda);
  Stream stream(memory);
  TrainStep(config, model, stream, mesh).plan_step();
  return {memory.report().total_bytes(), traffic};
}

// Of the gathers of a whole block, with one or two bytes an element.
int64_t gathers_of_blocks(const Config& config, int shards, const Traffic& traffic, int bytes) {
  const Transformer model(config.model, config.train.recompute, shards);
  const int64_t size = model.registry().unit(1).size;
  return std::ranges::count_if(traffic.transfers, [&](const Transfer& t) {
    return t.collective == Collective::kAllGather && t.bytes == bytes * size;
  });
}

TEST(Fp8Run, GathersHalfTheBytesInNoMoreMemory) {
  for (const OptimizerRun& run :
       {OptimizerRun{}, OptimizerRun{.world = 2},
        OptimizerRun{.sharding = Sharding::kGrad, .world = 2},
        OptimizerRun{.sharding = Sharding::kNone, .world = 2},
        OptimizerRun{.sharding = Sharding::kHybrid, .world = 4, .node_size = 2}}) {
    const int shards = run.sharding == Sharding::kNone ? 1 : std::min(run.world, 2);
    const auto plan = [&](const Config& config) {
      return plan_step(config, run.sharding, run.world, run.node_size);
    };
    const PlannedStep bf16 = plan(large("")), fp8 = plan(large("precision: fp8"));
    EXPECT_LE(fp8.bytes, bf16.bytes) << name_of(run.sharding) << run.world;
    const int64_t gathers = gathers_of_blocks(large(""), shards, bf16.traffic, 2);
    EXPECT_EQ(gathers > 0, shards > 1);
    EXPECT_EQ(gathers_of_blocks(large(""), shards, fp8.traffic, 1), gathers);
    EXPECT_EQ(gathers_of_blocks(large(""), shards, fp8.traffic, 2), 0);
  }
}

// The large models of configs/, each with its recomputation and with more: also where a backward
// pass and not the logits takes the most. Beside the matrices there are scales, and norms that
// every rank holds whole: numbers of some hundred KiB together, where a pool is placed in GiB.
TEST(Fp8Run, TheShippedModelsTakeNoMoreMemory) {
  constexpr size_t kNumbers = 1 << 20;
  struct Case {
    const char* model;
    int64_t micro_batch;
    std::vector<Recompute> recompute;
  };
  const std::filesystem::path configs = std::filesystem::path(SBTRAIN_SOURCE) / "configs";
  using enum Recompute;
  for (const auto& [model, micro_batch, all] :
       {Case{"350m_sb", 16, {kNone, kSelective, kFull}}, Case{"350m_rope", 16, {kNone}},
        Case{"1b_sb", 4, {kNone, kSelective, kFull}}, Case{"1b_rope", 8, {kNone}},
        Case{"3b_sb", 4, {kSelective}}, Case{"3b_rope", 1, {kSelective}}}) {
    for (const Recompute recompute : all) {
      Config config = load_config(configs / fmt::format("{}.yaml", model));
      config.train.micro_batch = micro_batch;
      config.train.recompute = recompute;
      for (const int world : {1, 2, 64}) {
        config.train.batch = micro_batch * world;
        for (const auto& [sharding, name] : kNames<Sharding>) {
          if (sharding == Sharding::kHybrid && world < 64) continue;
          if (sharding != Sharding::kFull && world == 1) continue;
          config.train.sharding = sharding;
          const auto bytes = [&](Precision precision) {
            config.train.precision = precision;
            return plan_rank(config, Backend::kCuda, {.world = world}).memory.total_bytes();
          };
          const size_t bf16 = bytes(Precision::kBf16);
          EXPECT_LE(bytes(Precision::kFp8), bf16 + kNumbers)
              << model << ", recompute " << name_of(recompute) << ", " << world << " ranks, "
              << name;
        }
      }
    }
  }
}

class Fp8Worlds : public testing::TestWithParam<OptimizerRun> {};

// Ranks share sequences: the gradients of micro-batches are the same, their sums in another order.
TEST_P(Fp8Worlds, TrainLikeOneRank) {
  const OptimizerResult one = run_optimizer(fp8(), {.last = 10});
  const OptimizerResult many = run_optimizer(fp8(), GetParam().steps(0, 10));
  for (size_t i = 0; i < one.losses.size(); ++i) {
    EXPECT_NEAR(many.losses[i], one.losses[i], 5e-3 * one.losses[i]) << i;
  }
}

TEST_P(Fp8Worlds, ResumeBitForBit) {
  const TemporaryFolder saved;
  OptimizerRun head = GetParam().steps(0, 2), rest = GetParam().steps(2, 4);
  head.to = rest.from = saved.path();
  run_optimizer(fp8(), head);
  EXPECT_EQ(run_optimizer(fp8(), rest).tensors,
            run_optimizer(fp8(), GetParam().steps(0, 4)).tensors);
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
