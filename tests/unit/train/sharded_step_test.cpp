// Steps of a model that several ranks share: every world and mode trains like one rank.
#include <gtest/gtest.h>

#include <cctype>
#include <cmath>
#include <mutex>
#include <string>
#include <vector>

#include "config/schema.h"
#include "ops/memory.h"
#include "support/model.h"
#include "support/planned_step.h"
#include "support/tensors.h"
#include "support/thread_world.h"
#include "support/whole_tensors.h"
#include "train/step.h"

namespace sbtrain {
namespace {

constexpr int32_t kLength = 16;
constexpr int32_t kVocab = 23;
constexpr int64_t kSequences = 8;  // of a step
constexpr double kRate = 1e-3;

struct Case {
  Sharding sharding = Sharding::kFull;
  int world = 1;
  int node_size = 1;
  bool tied = false;
  ReduceType reduce = ReduceType::kFloat32;
  bool planned = true;
  TransferEngine engine = TransferEngine::kMultiprocessors;
  bool olmo2 = false;  // the layout
  bool neox = false;   // likewise
  int context = 1;     // ranks that share a sequence
  Offload offload = Offload::kNone;
  const char* sticks = "";  // options of stick-breaking attention
  std::string name() const {
    std::string options = sticks;
    std::erase_if(options, [](char c) { return std::isalnum(static_cast<unsigned char>(c)) == 0; });
    return fmt::format("{}{}{}{}{}{}{}{}{}", name_of(sharding), world, tied ? "Tied" : "",
                       olmo2 ? "Olmo2" : "", neox ? "Neox" : "",
                       reduce == ReduceType::kBfloat16 ? "Bf16" : "",
                       engine == TransferEngine::kCopyEngines ? "ByCopies" : "",
                       context > 1 ? fmt::format("Context{}", context) : "", options);
  }
};
Case by_copies(Case c) {
  c.engine = TransferEngine::kCopyEngines;
  return c;
}
Case of_olmo2(Case c) {
  c.olmo2 = true;
  return c;
}
Case of_neox(Case c) {
  c.neox = true;
  return c;
}
Case in_context(int context, Case c) {
  c.context = context;
  return c;
}
Case with_sticks(const char* options, Case c) {
  c.sticks = options;
  return c;
}
void PrintTo(const Case& c, std::ostream* out) {  // NOLINT: GoogleTest's name
  *out << c.name();
}

Config config_of(const Case& c) {
  Config config;
  config.model.layers = 3;
  config.model.width = 12;  // no multiple of the alignment, so that shards cut through tensors
  config.model.inner = 20;
  config.model.heads = 2;
  config.model.vocab = kVocab;
  config.model.init_std = 0.3;
  config.model.tied = c.tied;
  if (*c.sticks != '\0') {
    config.model.attention = {
        parse_attention(fmt::format("{{type: stickbreaking, {}}}", c.sticks))};
  }
  if (c.olmo2) {
    config.model.norm_position = NormPosition::kOutput;
    config.model.attention = {
        parse_attention("{type: softmax, qk_norm: true, qk_norm_scope: joint}")};
  }
  if (c.neox) {
    config.model.norm = NormKind::kLayerNorm;
    config.model.mlp = MlpKind::kGeluTanh;
    config.model.parallel_residual = true;
    config.model.attention = {
        parse_attention("{type: softmax, rope_fraction: 0.67, qkv_bias: true, output_bias: true}")};
  }
  config.train.sequence_length = kLength;
  config.train.micro_batch = 1;
  config.train.batch = kSequences;
  config.train.sharding = c.sharding;
  config.train.context_parallel = c.context;
  config.train.offload = c.offload;
  config.train.reduce_dtype = c.reduce;
  config.train.gather_engine = c.engine;
  config.train.reduce_engine = c.engine;
  return config;
}

// The sequence `index` of the step: documents whose number of valid targets differs.
PackedBatch sequence(int64_t step, int64_t index) {
  const auto cut = static_cast<int32_t>(1 + (step + 3 * index) % (kLength - 1));
  return test::packed_batch({cut, kLength - cut}, kVocab,
                            static_cast<uint64_t>(step * kSequences + index));
}

struct Trained {
  std::vector<double> losses, norms, validation;
  test::WholeTensors tensors;
};

// What rank 0 saw of `steps` steps, and the model that all ranks together hold afterwards.
Trained train(const Case& c, int steps, bool bad_step = false) {
  const Config config = config_of(c);
  Trained result;
  std::mutex mutex;
  test::run_ranks(c.world, [&](Communicator& ranks) {
    const Mesh mesh(ranks, c.sharding, c.node_size, c.context);
    const Transformer model(config.model, Recompute::kNone, mesh.shard_count());
    Memory memory(Backend::kCpu);
    if (steps < 10) memory.poison();
    if (c.planned) test::adopt_step_plan(memory, config, model, mesh);
    Stream stream(memory);
    TrainStep step(config, model, stream, mesh);
    step.params().initialize(3);
    const int64_t share = kSequences / mesh.data_ranks();
    for (int n = 0; n < steps; ++n) {
      std::vector<PackedBatch> batches;
      for (int64_t m = 0; m < share; ++m)
        batches.push_back(sequence(n, share * mesh.data_rank() + m));
      if (bad_step && n == 1 && ranks.rank() == ranks.world() - 1) {
        // One rank's gradients overflow; no rank may apply the step.
        const Tensor& w = step.params().shard(1).weights;
        const float kept = w.f32()[0];
        w.f32()[0] = std::numeric_limits<float>::infinity();
        step.params().refresh();
        const StepResult bad = step.run(batches, kRate).wait();
        EXPECT_FALSE(std::isfinite(bad.loss) && std::isfinite(bad.grad_norm));
        w.f32()[0] = kept;
        step.params().refresh();
        continue;
      }
      if (bad_step && n == 1) {
        step.params().refresh();
        EXPECT_EQ(step.run(batches, kRate).wait().updates, 1);
        step.params().refresh();
        continue;
      }
      const StepResult seen = step.run(batches, kRate).wait();
      const double validation = step.evaluate(sequence(100 + n, mesh.data_rank())).loss;
      if (ranks.rank() != 0) continue;
      result.losses.push_back(seen.loss);
      result.norms.push_back(seen.grad_norm);
      result.validation.push_back(validation);
    }
    const std::lock_guard lock(mutex);
    test::add_tensors_of_rank(result.tensors, step.params());
  });
  return result;
}

class ShardedStep : public testing::TestWithParam<Case> {};

TEST_P(ShardedStep, TrainsLikeOneRank) {
  Case one = GetParam();
  one.world = one.node_size = one.context = 1;
  one.sharding = Sharding::kFull;
  one.reduce = ReduceType::kFloat32;
  constexpr int kSteps = 50;
  const Trained expected = train(one, kSteps);
  const Trained trained = train(GetParam(), kSteps);
  ASSERT_EQ(trained.losses.size(), expected.losses.size());
  // Sums over ranks and micro-batches are formed in another order, and bfloat16 rounds each sum.
  // What this changes grows from step to step: AdamW turns a small difference of a small gradient
  // into one of the weight.
  const bool rounds = GetParam().reduce == ReduceType::kBfloat16;
  const double bound = rounds ? 2e-3 : 2e-6;
  // OLMo 2 normalises what attention and MLP give, which is small in a model that has just begun:
  // gradients through these norms are the larger by it, and so is what rounding changes in them.
  // Within ten steps it is 3e-6 of the norm, in other layouts 1e-7.
  const double norm_bound = (GetParam().olmo2 ? 50 : 10) * bound;
  for (int n = 0; n < kSteps; ++n) {
    EXPECT_NEAR(trained.losses[n], expected.losses[n], bound * expected.losses[n]) << n;
    EXPECT_NEAR(trained.norms[n], expected.norms[n], norm_bound * expected.norms[n]) << n;
  }
}

TEST_P(ShardedStep, RepeatsBitForBit) {
  const Trained a = train(GetParam(), 6);
  const Trained b = train(GetParam(), 6);
  EXPECT_EQ(a.losses, b.losses);
  EXPECT_EQ(a.norms, b.norms);
  EXPECT_EQ(a.validation, b.validation);
  EXPECT_EQ(a.tensors, b.tensors);
}

// Without a plan every buffer has memory of its own. The planned pool is reused at once, and holds
// NaN in between.
TEST_P(ShardedStep, ThePlannedPoolGivesTheSameBits) {
  Case own = GetParam();
  own.planned = false;
  const Trained a = train(own, 4);
  const Trained b = train(GetParam(), 4);
  EXPECT_EQ(a.losses, b.losses);
  EXPECT_EQ(a.tensors, b.tensors);
}

TEST_P(ShardedStep, OffloadingGivesTheSameBits) {
  Case offloaded = GetParam();
  offloaded.offload = Offload::kActivations;
  const Trained a = train(GetParam(), 4);
  const Trained b = train(offloaded, 4);
  EXPECT_EQ(a.losses, b.losses);
  EXPECT_EQ(a.norms, b.norms);
  EXPECT_EQ(a.tensors, b.tensors);
}

TEST_P(ShardedStep, AStepThatOneRankCannotApplyIsAppliedByNone) {
  EXPECT_EQ(train(GetParam(), 2, /*bad_step=*/true).tensors, train(GetParam(), 1).tensors);
}

INSTANTIATE_TEST_SUITE_P(
    Worlds, ShardedStep,
    testing::Values(
        of_olmo2({Sharding::kFull, 2}), of_olmo2({Sharding::kGrad, 2, 1, true}),
        of_neox({Sharding::kFull, 2}), of_neox({Sharding::kHybrid, 4, 2}), Case{Sharding::kFull, 2},
        Case{Sharding::kFull, 4, 1, true}, Case{Sharding::kFull, 8},
        Case{Sharding::kGrad, 2, 1, true}, Case{Sharding::kGrad, 4}, Case{Sharding::kNone, 2},
        Case{Sharding::kNone, 4, 1, true}, Case{Sharding::kHybrid, 4, 2},
        Case{Sharding::kHybrid, 8, 2, true},
        Case{Sharding::kFull, 2, 1, false, ReduceType::kBfloat16},
        Case{Sharding::kHybrid, 4, 2, true, ReduceType::kBfloat16}, by_copies({Sharding::kFull, 4}),
        by_copies({Sharding::kGrad, 2, 1, true}), by_copies({Sharding::kHybrid, 8, 4}),
        by_copies({Sharding::kFull, 2, 1, false, ReduceType::kBfloat16}),
        in_context(2, {Sharding::kFull, 2}), in_context(4, {Sharding::kFull, 4}),
        in_context(2, {Sharding::kGrad, 4, 1, true}), in_context(2, {Sharding::kNone, 2}),
        in_context(4, {Sharding::kNone, 8}), in_context(2, {Sharding::kHybrid, 4, 2}),
        in_context(4, {Sharding::kHybrid, 8, 2}), in_context(2, by_copies({Sharding::kFull, 4})),
        with_sticks("remainder: bias", in_context(4, {Sharding::kFull, 4})),
        with_sticks("remainder: bias", in_context(2, {Sharding::kGrad, 4, 1, true})),
        with_sticks("remainder: bias", in_context(2, {Sharding::kNone, 2})),
        with_sticks("remainder: value", in_context(2, {Sharding::kHybrid, 4, 2})),
        with_sticks("forget_gate: true", in_context(4, {Sharding::kFull, 4})),
        with_sticks("forget_gate: true", in_context(2, {Sharding::kGrad, 4, 1, true})),
        with_sticks("forget_gate: true", in_context(2, {Sharding::kNone, 2})),
        with_sticks("forget_gate: true", in_context(2, {Sharding::kHybrid, 4, 2}))),
    [](const auto& info) { return info.param.name(); });

TEST(ShardedStep, RecordedWorkIsForOneRank) {
  Config config = config_of({.world = 2});
  config.train.cuda_graph = CudaGraph::kOn;
  test::run_ranks(2, [&](Communicator& ranks) {
    const Mesh mesh(ranks, Sharding::kFull, 1);
    const Transformer model(config.model, Recompute::kNone, mesh.shard_count());
    Memory plan(Backend::kPlan);
    Stream stream(plan);
    try {
      TrainStep(config, model, stream, mesh).plan();
      FAIL() << "two ranks were accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kConfig);
      EXPECT_NE(std::string(error.what()).find("train.cuda_graph"), std::string::npos);
    }
  });
}

}  // namespace
}  // namespace sbtrain
