#include "train/scale.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "core/device.h"
#include "core/error.h"

namespace sbtrain {
namespace {

Config small() {
  Config config;
  config.model.layers = 2;
  config.model.width = 64;
  config.model.inner = 128;
  config.model.heads = 2;
  config.model.vocab = 256;
  config.train.sequence_length = 32;
  config.train.micro_batch = 1;
  config.train.batch = 64;
  StageConfig stage;
  stage.length = {.count = 10, .unit = Duration::Unit::kSteps};
  config.stages = {stage};
  return config;
}

DryRunOptions four_nodes_of_two() {
  DryRunOptions options;
  options.world = 8;
  options.gpus_per_node = 2;
  return options;
}

RankPlan plan(Sharding sharding, int64_t micro_batch = 4) {
  Config config = small();
  config.train.sharding = sharding;
  config.train.micro_batch = micro_batch;
  return plan_rank(config, Backend::kCuda, four_nodes_of_two());
}

size_t persistent(const RankPlan& plan, MemoryClass c) {
  return plan.memory.persistent[static_cast<int>(c)];
}

int64_t moved(const RankPlan& plan, Collective collective, GroupLayout group) {
  int64_t bytes = 0;
  for (const Transfer& t : plan.traffic.transfers) {
    if (t.collective == collective && t.group == group && t.bytes > 1000) bytes += t.bytes;
  }
  return bytes;
}

// Keys and values of a group of heads are kept once, in bf16, from the forward to the backward pass
// of each layer: nothing of the plan has them for every head.
TEST(Scale, GroupsOfHeadsSaveTheMemoryOfTheirKeysAndValues) {
  constexpr int64_t kTokens = 4096, kHeads = 8, kKeyHeads = 2, kHeadDim = 64, kLayers = 4;
  for (const char* type : {"stickbreaking", "softmax"}) {
    Config config = small();
    config.model.layers = kLayers;
    config.model.heads = kHeads;
    config.model.width = kHeads * kHeadDim;
    config.model.attention = {{.type = type}};
    config.train.sequence_length = kTokens;
    const auto attention_bytes = [&](int64_t key_heads) {
      config.model.kv_heads = key_heads;
      const MemoryReport report = plan_memory(config, Backend::kCuda);
      size_t most = 0;
      for (const MemoryReport::Program& program : report.programs) {
        most = std::max(most, program.at_peak[static_cast<size_t>(MemoryClass::kAttention)]);
      }
      return most;
    };
    EXPECT_GE(attention_bytes(kHeads) - attention_bytes(kKeyHeads),
              kLayers * 2 * (kHeads - kKeyHeads) * kHeadDim * kTokens * 2)
        << type;
  }
}

// Moments are f32 of what a rank owns: an eighth, a half within a node, or all.
TEST(Scale, ARankHoldsItsShareOfTheMoments) {
  const size_t whole = persistent(plan(Sharding::kNone), MemoryClass::kOptimizer);
  EXPECT_NEAR(static_cast<double>(persistent(plan(Sharding::kFull), MemoryClass::kOptimizer)),
              static_cast<double>(whole) / 8, static_cast<double>(whole) / 50);
  EXPECT_NEAR(static_cast<double>(persistent(plan(Sharding::kHybrid), MemoryClass::kOptimizer)),
              static_cast<double>(whole) / 2, static_cast<double>(whole) / 50);
}

TEST(Scale, LibrariesTakeMemoryOfAGpu) {
  const RankPlan several = plan(Sharding::kFull);
  EXPECT_GT(several.libraries, library_memory(Backend::kCuda, 1));
  EXPECT_EQ(several.total_bytes(), several.memory.total_bytes() + several.libraries);
  EXPECT_EQ(plan_rank(small(), Backend::kCpu, four_nodes_of_two()).libraries, 0U);
}

TEST(Scale, CollectivesFollowTheMode) {
  const GroupLayout all = {8, 4};
  const GroupLayout node = {2, 1};
  const GroupLayout replicas = {4, 4};
  const RankPlan full = plan(Sharding::kFull);
  EXPECT_GT(moved(full, Collective::kAllGather, all), 0);
  EXPECT_GT(moved(full, Collective::kReduceScatter, all), 0);
  EXPECT_EQ(moved(full, Collective::kAllReduce, all), 0);
  const RankPlan none = plan(Sharding::kNone);
  EXPECT_EQ(moved(none, Collective::kAllGather, all), 0);
  EXPECT_GT(moved(none, Collective::kAllReduce, all), 0);
  const RankPlan hybrid = plan(Sharding::kHybrid);
  EXPECT_EQ(moved(hybrid, Collective::kAllGather, all), 0);
  EXPECT_GT(moved(hybrid, Collective::kAllGather, node), 0);
  EXPECT_GT(moved(hybrid, Collective::kAllReduce, replicas), 0);
  // Eight sequences a rank: two micro-batches of four gather half as much as four of two.
  EXPECT_EQ(2 * moved(full, Collective::kAllGather, all),
            moved(plan(Sharding::kFull, 2), Collective::kAllGather, all));
}

TEST(Scale, TheBestChoiceFitsAndIsTheFastest) {
  const DryRunOptions options = four_nodes_of_two();
  const std::vector<RankPlan> plans = plan_choices(small(), Backend::kCuda, options);
  EXPECT_EQ(plans.size(), 4U * 4U);  // four modes; micro-batches of 1, 2, 4 and 8
  const std::string text = describe_scale(small(), Backend::kCuda, options);
  EXPECT_NE(text.find("the fastest that fits: sharding"), std::string::npos) << text;
  Config config = small();
  config.machine.memory_gib = config.machine.reserve_gib;
  const std::string none = describe_scale(config, Backend::kCuda, options);
  EXPECT_NE(none.find("no choice fits"), std::string::npos) << none;
}

TEST(Scale, ABatchThatTheRanksCannotShareIsRefused) {
  Config config = small();
  config.train.batch = 60;
  try {
    plan_rank(config, Backend::kCuda, four_nodes_of_two());
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ExitCode::kConfig);
    EXPECT_NE(std::string(e.what()).find("multiple of 8"), std::string::npos) << e.what();
  }
}

// A rank has fewer sequences than the configured micro-batch.
TEST(Scale, PlansTheLargestMicroBatchThatTheRanksCanShare) {
  Config config = small();
  config.train.micro_batch = 16;
  DryRunOptions options = four_nodes_of_two();
  const std::string planned = describe_scale(config, Backend::kCuda, options);
  EXPECT_TRUE(
      planned.starts_with("train.micro_batch 16 cannot divide 64 sequences among 8 ranks: "
                          "the plan is that of --train.micro_batch=8\n"))
      << planned;
  config.train.micro_batch = 8;
  EXPECT_TRUE(planned.ends_with(describe_scale(config, Backend::kCuda, options))) << planned;
  options.world = 7;
  EXPECT_THROW(describe_scale(config, Backend::kCuda, options), Error);
}

}  // namespace
}  // namespace sbtrain
