// Ranks that are threads and share one GPU: their communicator, and steps in which they share every
// sequence.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <vector>

#include "config/schema.h"
#include "support/communicator_suite.h"
#include "support/gpu_thread_world.h"
#include "support/model.h"
#include "support/planned_step.h"
#include "train/step.h"

namespace sbtrain::test {
namespace {

class GpuCommunicator : public GpuTest, public testing::WithParamInterface<CommunicatorCheck> {};

INSTANTIATE_TEST_SUITE_P(Checks, GpuCommunicator, testing::ValuesIn(communicator_checks()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(GpuCommunicator, HoldsForThreads) {
  if (GetParam().large) GTEST_SKIP() << "takes 7 GB a rank";
  for (const int world : {1, 2, 3}) {
    SCOPED_TRACE(world);
    run_gpu_ranks(world, [](Communicator& ranks) {
      GpuStream gpu;
      GetParam().run(ranks, gpu);
    });
  }
}

constexpr int32_t kRowLength = 768;
constexpr int32_t kRowVocab = 509;

Config config_of(const char* attention, int64_t head_dim, int context,
                 ContextLayout layout = ContextLayout::kConsecutive) {
  Config config;
  config.model.layers = 2;
  config.model.width = 4 * head_dim;
  config.model.inner = 296;
  config.model.heads = 4;
  config.model.kv_heads = 2;
  config.model.vocab = kRowVocab;
  config.model.init_std = 0.08;
  config.model.attention = {parse_attention(attention)};
  config.train.sequence_length = kRowLength;
  config.train.micro_batch = 2;
  config.train.batch = 2;
  config.train.context_parallel = context;
  config.train.context_layout = layout;
  return config;
}

// Documents that end within parts, at their borders, and that go on over several.
const std::vector<std::vector<int32_t>> kRows = {
    {kRowLength, kRowLength}, {1, kRowLength - 1, 200, 184, 384}, {703, 65, 1, 1, 1, 765}};

struct Trained {
  std::vector<double> losses, norms, validation;
};

Trained train(const Config& config, const std::string& implementation) {
  Trained result;
  const auto world = static_cast<int>(config.train.context_parallel);
  run_gpu_ranks(world, [&](Communicator& ranks) {
    const Mesh mesh(ranks, Sharding::kFull, world, world);
    const Transformer model(config.model, config.train.recompute, mesh.shard_count());
    Memory memory(Backend::kCuda);
    adopt_step_plan(memory, config, model, mesh, implementation);
    Stream stream(memory);
    stream.set_implementation(implementation);
    TrainStep step(config, model, stream, mesh);
    step.params().initialize(3);
    for (size_t n = 0; n < kRows.size(); ++n) {
      const PackedBatch batch = packed_batch(kRows[n], kRowVocab, n);
      const StepResult seen = step.run({&batch, 1}, 1e-3).wait();
      const ValidationSums sums = step.evaluate(batch, 1000);
      if (ranks.rank() != 0) continue;
      result.losses.push_back(seen.loss);
      result.norms.push_back(seen.grad_norm);
      result.validation.push_back(sums.loss);
    }
  });
  return result;
}

void expect_near(const std::vector<double>& a, const std::vector<double>& b, double error) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], error * b[i]) << i;
}

struct ContextCase {
  const char* attention;
  int64_t head_dim;
  const char* implementation;
};

class GpuContextStep : public GpuTest, public testing::WithParamInterface<ContextCase> {};

INSTANTIATE_TEST_SUITE_P(
    Modules, GpuContextStep,
    testing::Values(ContextCase{"{type: stickbreaking}", 64, "hopper"},
                    ContextCase{"{type: stickbreaking, skip_epsilon: 0}", 128, "hopper"},
                    ContextCase{"{type: stickbreaking, attend_current: true}", 32, "portable"},
                    ContextCase{"{type: stickbreaking, head_norm: true, qk_norm: true}", 64, ""},
                    ContextCase{"{type: stickbreaking, remainder: value}", 64, ""},
                    ContextCase{"{type: stickbreaking, remainder: bias, head_norm: true}", 32, ""},
                    ContextCase{"{type: stickbreaking, forget_gate: true}", 64, ""},
                    ContextCase{"{type: stickbreaking, forget_gate: true}", 32, "portable"},
                    ContextCase{"{type: softmax}", 64, ""},
                    ContextCase{"{type: softmax, position: alibi, window: 300}", 128, ""},
                    ContextCase{"{type: softmax, window: 500}", 32, "portable"},
                    ContextCase{"{type: coca}", 64, ""}));

// Losses of bf16 differ by rounding alone, and so do norms, by more.
TEST_P(GpuContextStep, TrainsLikeOneRank) {
  const ContextCase& c = GetParam();
  if (std::string(c.implementation) == "hopper") {
    const GpuStream gpu;
    if (!gpu.stream.target().has_wgmma()) GTEST_SKIP() << "needs a GPU with wgmma";
  }
  const Trained expected = train(config_of(c.attention, c.head_dim, 1), c.implementation);
  for (const ContextLayout layout : {ContextLayout::kConsecutive, ContextLayout::kFolded}) {
    for (const int context : {2, 3, 4}) {
      SCOPED_TRACE(fmt::format("{} {}", name_of(layout), context));
      const Config config = config_of(c.attention, c.head_dim, context, layout);
      const Trained trained = train(config, c.implementation);
      expect_near(trained.losses, expected.losses, 2e-3);
      expect_near(trained.norms, expected.norms, 2e-2);
      expect_near(trained.validation, expected.validation, 2e-3);
      const Trained again = train(config, c.implementation);
      EXPECT_EQ(again.losses, trained.losses);
      EXPECT_EQ(again.norms, trained.norms);
    }
  }
}

}  // namespace
}  // namespace sbtrain::test
