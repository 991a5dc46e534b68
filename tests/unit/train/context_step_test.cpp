// Long sequences that ranks share: steps give what they give on one rank, whatever the documents.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "config/schema.h"
#include "optim/adamw.h"
#include "support/model.h"
#include "support/planned_step.h"
#include "support/thread_world.h"
#include "support/whole_tensors.h"
#include "train/step.h"

namespace sbtrain {
namespace {

constexpr int32_t kRowLength = 384;
constexpr int32_t kRowVocab = 29;

Config config_of(const char* attention, int context,
                 ContextLayout layout = ContextLayout::kConsecutive) {
  Config config;
  config.model.layers = 2;
  config.model.width = 32;
  config.model.inner = 48;
  config.model.heads = 4;
  config.model.kv_heads = 2;
  config.model.vocab = kRowVocab;
  config.model.init_std = 0.4;
  config.model.attention = {parse_attention(attention)};
  // Rounding of the weights by itself changes the first gradient by 2e-6 to 6e-6 of its norm with
  // 0.4; with CoCA, whose scores are products of three projections, it would be by 2e-5.
  if (config.model.attention[0].type == "coca") config.model.init_std = 0.25;
  config.train.sequence_length = kRowLength;
  config.train.micro_batch = 2;
  config.train.batch = 2;
  config.train.context_parallel = context;
  config.train.context_layout = layout;
  // With a smaller one AdamW moves a weight whose gradient is nothing but rounding by the whole
  // rate, in either direction, so that steps of two orders of sums have no bound.
  config.train.optimizer.options.as<AdamWOptions>().eps = 1e-3;
  return config;
}

// Documents that end within parts, at their borders, and that go on over several.
const std::vector<std::vector<int32_t>> kRows = {
    {kRowLength, kRowLength},
    {1, kRowLength - 1, 100, 92, 192},
    {200, 184, 384},
    {384 - 65, 65, 1, 1, 1, 381},
};

struct Trained {
  std::vector<double> losses, norms, validation;
  // After each step. In them are all gradients, in the first moments as sums over the steps.
  std::vector<test::WholeTensors> tensors;
};

Trained train(const Config& config) {
  constexpr double kStepRate = 1e-3;
  Trained result;
  result.tensors.resize(kRows.size());
  std::mutex mutex;
  const auto world = static_cast<int>(config.train.context_parallel);
  test::run_ranks(world, [&](Communicator& ranks) {
    const Mesh mesh(ranks, Sharding::kFull, world, world);
    const Transformer model(config.model, config.train.recompute, mesh.shard_count());
    Memory memory(Backend::kCpu);
    memory.poison();
    test::adopt_step_plan(memory, config, model, mesh);
    Stream stream(memory);
    TrainStep step(config, model, stream, mesh);
    step.params().initialize(3);
    for (size_t n = 0; n < kRows.size(); ++n) {
      const PackedBatch batch = test::packed_batch(kRows[n], kRowVocab, n);
      const StepResult seen = step.run({&batch, 1}, kStepRate).wait();
      const ValidationSums sums = step.evaluate(batch, 1000);
      EXPECT_EQ(sums.targets, static_cast<double>(batch.valid_targets));
      EXPECT_EQ(sums.bytes, 1000);
      const std::lock_guard lock(mutex);
      test::add_tensors_of_rank(result.tensors[n], step.params());
      if (ranks.rank() != 0) continue;
      result.losses.push_back(seen.loss);
      result.norms.push_back(seen.grad_norm);
      result.validation.push_back(sums.loss);
    }
  });
  return result;
}

void expect_near(const std::vector<double>& a, const std::vector<double>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 1e-5 * b[i]) << i;
}

// All tensors of a kind together: weights, and each state of the optimizer.
void expect_near(const test::WholeTensors& a, const test::WholeTensors& b) {
  std::map<std::string, double> difference, size;  // squared, by kind
  for (const auto& [name, expected] : b) {
    const std::string kind = name.substr(0, name.find(' '));
    const std::vector<float>& seen = a.at(name);
    ASSERT_EQ(seen.size(), expected.size()) << name;
    double& kinds_difference = difference[kind];
    double& kinds_size = size[kind];
    for (size_t i = 0; i < seen.size(); ++i) {
      const double x = expected[i], error = seen[i] - x;
      kinds_difference += error * error;
      kinds_size += x * x;
    }
  }
  EXPECT_TRUE(difference.contains(kAdamM));
  for (const auto& [kind, squared] : difference) {
    EXPECT_LE(std::sqrt(squared), 1e-5 * std::sqrt(size[kind])) << kind;
  }
}

class ContextStep : public testing::TestWithParam<const char*> {};

TEST_P(ContextStep, TrainsLikeOneRank) {
  const Trained expected = train(config_of(GetParam(), 1));
  for (const ContextLayout layout : {ContextLayout::kConsecutive, ContextLayout::kFolded}) {
    for (const int context : {2, 3, 4, 8}) {
      SCOPED_TRACE(fmt::format("{} {}", name_of(layout), context));
      const Trained trained = train(config_of(GetParam(), context, layout));
      expect_near(trained.losses, expected.losses);
      expect_near(trained.norms, expected.norms);
      expect_near(trained.validation, expected.validation);
      for (size_t n = 0; n < kRows.size(); ++n) {
        SCOPED_TRACE(fmt::format("after step {}", n));
        expect_near(trained.tensors[n], expected.tensors[n]);
      }
    }
  }
}

TEST_P(ContextStep, RepeatsBitForBitAndWithRecomputation) {
  for (const ContextLayout layout : {ContextLayout::kConsecutive, ContextLayout::kFolded}) {
    SCOPED_TRACE(name_of(layout));
    Config config = config_of(GetParam(), 4, layout);
    const Trained a = train(config);
    const Trained b = train(config);
    EXPECT_EQ(a.losses, b.losses);
    EXPECT_EQ(a.norms, b.norms);
    config.train.recompute = Recompute::kFull;
    EXPECT_EQ(train(config).norms, a.norms);
    config.train.offload = Offload::kActivations;
    const Trained offloaded = train(config);
    EXPECT_EQ(offloaded.losses, a.losses);
    EXPECT_EQ(offloaded.norms, a.norms);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Modules, ContextStep,
    testing::Values("{type: stickbreaking}", "{type: stickbreaking, skip_epsilon: 0}",
                    "{type: stickbreaking, head_norm: true, qk_norm: true}",
                    "{type: stickbreaking, attend_current: true}",
                    "{type: stickbreaking, remainder: value}",
                    "{type: stickbreaking, forget_gate: true}",
                    "{type: stickbreaking, forget_gate: true, gate_penalty: 0.5, skip_epsilon: 0, "
                    "remainder: value}",
                    "{type: stickbreaking, remainder: bias, head_norm: true}", "{type: softmax}",
                    "{type: softmax, window: 70}", "{type: softmax, position: alibi}",
                    "{type: softmax, position: none, window: 200}",
                    "{type: softmax, position: alibi, window: 130}", "{type: coca, window: 300}"));

}  // namespace
}  // namespace sbtrain
