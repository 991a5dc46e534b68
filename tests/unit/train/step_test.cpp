// Steps on batches in which most targets are ignored: the mean of the loss, and accuracy.
#include "train/step.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>

#include "ops/memory.h"
#include "parallel/communicator.h"
#include "support/planned_step.h"
#include "support/tensors.h"

namespace sbtrain {
namespace {

constexpr int64_t kStepLength = 24;
constexpr int32_t kStepVocab = 19;

Config small_config(int64_t micro_batch) {
  Config config;
  config.model.layers = 2;
  config.model.width = 16;
  config.model.inner = 24;
  config.model.heads = 2;
  config.model.vocab = kStepVocab;
  config.model.init_std = 0.5;
  config.train.sequence_length = kStepLength;
  config.train.micro_batch = micro_batch;
  return config;
}

// Appends a sequence whose every `stride`-th target is labelled.
void append(PackedBatch& batch, int32_t stride, uint64_t index) {
  const Philox random(1, RandomPurpose::kTest, "step", index);
  if (batch.cu_seqlens.empty()) batch.cu_seqlens = {0};
  for (int32_t i = 0; i < kStepLength; ++i) {
    const bool labelled = i % stride == 1;
    batch.tokens.push_back(static_cast<int32_t>(random.bits(2 * i) % kStepVocab));
    batch.targets.push_back(labelled ? static_cast<int32_t>(random.bits(2 * i + 1) % kStepVocab)
                                     : -1);
    batch.positions.push_back(i);
    batch.valid_targets += labelled;
  }
  batch.cu_seqlens.push_back(batch.cu_seqlens.back() + static_cast<int32_t>(kStepLength));
}

// A model whose weights are initialised with a fixed seed.
struct Model {
  explicit Model(int64_t micro_batch, bool planned = false,
                 std::unique_ptr<Communicator> ranks = make_single_process(),
                 std::optional<Config> other = {})
      : config(other.value_or(small_config(micro_batch))),
        memory(Backend::kCpu),
        stream(memory),
        transformer(config.model),
        communicator(std::move(ranks)),
        mesh(*communicator),
        step(with_memory(planned), transformer, stream, mesh) {
    step.params().initialize(3);
  }
  const Config& with_memory(bool planned) {
    memory.poison();
    if (planned) test::adopt_step_plan(memory, config, transformer, mesh);
    return config;
  }
  Config config;
  Memory memory;
  Stream stream;
  Transformer transformer;
  std::unique_ptr<Communicator> communicator;
  Mesh mesh;
  TrainStep step;
};

TEST(TrainStep, TheMeanIsOverAllLabelsOfTheStepHoweverItIsSplit) {
  PackedBatch few, many, both;
  append(few, 12, 0);  // 2 labels
  append(many, 2, 1);  // 12
  append(both, 12, 0);
  append(both, 2, 1);
  ASSERT_EQ(few.valid_targets, 2);
  ASSERT_EQ(many.valid_targets, 12);
  Model split(1);
  Model whole(2);
  const double sum_of_few = split.step.evaluate(few).loss;
  const double sum_of_many = split.step.evaluate(many).loss;
  const std::vector<PackedBatch> two = {few, many};
  const StepResult by_two = split.step.run(two, 0.0).wait();
  const StepResult by_one = whole.step.run({&both, 1}, 0.0).wait();
  EXPECT_NEAR(by_two.loss, (sum_of_few + sum_of_many) / 14, 1e-6);
  EXPECT_NEAR(by_one.loss, by_two.loss, 1e-6);
  EXPECT_NEAR(by_one.grad_norm, by_two.grad_norm, 1e-5 * by_two.grad_norm);
}

// Alone, but as if another rank had contributed to every sum of f64 numbers.
class WithAnotherRank : public Communicator {
 public:
  std::vector<double> other;
  int reductions = 0;
  int rank() const override { return 0; }
  int world() const override { return 1; }
  void sum(std::span<double>) override { FAIL() << "the host waits for other ranks"; }
  std::string broadcast(std::string value, int) override { return value; }
  std::vector<std::string> all_gather(std::string value) override { return {std::move(value)}; }
  void barrier() override {}
  std::unique_ptr<Communicator> split(const ColorOf&) override { return make_single_process(); }

 protected:
  void run_all_gather(Stream&, const Tensor&, const Tensor&) override {}
  void run_reduce_scatter(Stream&, const Tensor&, const Tensor&) override {}
  void run_broadcast(Stream&, const Tensor&, int) override {}
  void run_all_to_all(Stream&, const Tensor&, const Tensor&) override {}
  void run_shift(Stream&, const Tensor&, const Tensor&, Neighbours) override {}
  void run_all_reduce(Stream& s, const Tensor& x) override {
    if (s.planning()) return;
    ++reductions;
    ASSERT_EQ(x.numel(), static_cast<int64_t>(other.size()));
    for (size_t i = 0; i < other.size(); ++i) x.f64()[i] += other[i];
  }
};

TEST(TrainStep, OneReductionHasLossNormTargetsAndRequests) {
  PackedBatch batch;
  append(batch, 2, 1);  // 12 labels
  Model alone(1);
  const StepResult own = alone.step.run({&batch, 1}, 0.0).wait();
  auto communicator = std::make_unique<WithAnotherRank>();
  WithAnotherRank& ranks = *communicator;
  Model model(1, /*planned=*/false, std::move(communicator));
  const auto run = [&](double stop, double save, Requests mine) {
    // loss, squared norm, valid targets, and what the other rank was asked to do
    ranks.other = {30, 7, 4, stop, save};
    ranks.reductions = 0;
    const std::array<double, 2> asked = {mine.stop ? 1.0 : 0.0, mine.save ? 1.0 : 0.0};
    const StepResult all = model.step.run({&batch, 1}, 0.0, asked.data()).wait();
    EXPECT_EQ(ranks.reductions, 1);
    EXPECT_NEAR(all.loss, (12 * own.loss + 30) / 16, 1e-12);
    EXPECT_NEAR(all.grad_norm, std::sqrt(std::pow(12 * own.grad_norm, 2) + 7) / 16, 1e-12);
    return all.requests;
  };
  for (const bool other : {false, true}) {
    for (const bool mine : {false, true}) {
      const Requests stop = run(other, 0, {.stop = mine});
      EXPECT_EQ(stop.stop, other || mine);
      EXPECT_FALSE(stop.save);
      const Requests save = run(0, other, {.save = mine});
      EXPECT_FALSE(save.stop);
      EXPECT_EQ(save.save, other || mine);
    }
  }
}

// A step that is skipped as a spike leaves the weights as they are, and set_running_loss makes
// another step object decide as this one would.
TEST(TrainStep, SpikesAreSkippedAndTheirStateCanBeSet) {
  PackedBatch batch;
  append(batch, 2, 1);
  Config config = small_config(1);
  config.train.spike_sigma = 2;
  config.train.spike_window = 4;
  Model model(1, /*planned=*/false, make_single_process(), config);
  StepResult result;
  for (int i = 0; i < 4; ++i) result = model.step.run({&batch, 1}, 1e-3).wait();
  EXPECT_FALSE(result.spike);
  EXPECT_EQ(result.running.count, 4);
  Model other(1, /*planned=*/false, make_single_process(), config);
  const RunningLoss low{.count = 4, .mean = 0.5, .variance = 0.01};
  for (Model* each : {&model, &other}) {
    each->step.set_running_loss(low);
    const double before = each->step.evaluate(batch).loss;
    const StepResult skipped = each->step.run({&batch, 1}, 1e-3).wait();
    EXPECT_TRUE(skipped.spike);
    EXPECT_EQ(skipped.running, low);
    EXPECT_EQ(each->step.evaluate(batch).loss, before);
    each->step.set_running_loss();
    EXPECT_FALSE(each->step.run({&batch, 1}, 1e-3).wait().spike);
    EXPECT_NE(each->step.evaluate(batch).loss, before);
  }
}

TEST(TrainStep, ValidationSumsAreThoseOfAllRanks) {
  PackedBatch batch, empty;
  append(batch, 2, 1);
  append(empty, 2, 1);
  empty.targets.assign(empty.targets.size(), -1);
  empty.valid_targets = 0;
  Model alone(1);
  const ValidationSums own = alone.step.evaluate(batch, 40);
  EXPECT_EQ(own.targets, 12);
  EXPECT_EQ(own.bytes, 40);
  EXPECT_FALSE(own.stop);
  auto communicator = std::make_unique<WithAnotherRank>();
  communicator->other = {30, 2, 4, 10, 1};
  Model model(1, /*planned=*/false, std::move(communicator));
  const ValidationSums all = model.step.evaluate(batch, 40);
  EXPECT_EQ(all.loss, own.loss + 30);
  EXPECT_EQ(all.hits, own.hits + 2);
  EXPECT_EQ(all.targets, 16);
  EXPECT_EQ(all.bytes, 50);
  EXPECT_TRUE(all.stop);
  EXPECT_EQ(model.step.evaluate(empty).loss, 30);  // of a rank without data
}

// The gradients of a step's first micro-batch replace whatever the buffers hold, in every tensor
// and in the padding between them; later micro-batches add to them.
TEST(TrainStep, TheFirstMicroBatchOverwritesGradients) {
  std::vector<PackedBatch> batches(2);
  append(batches[0], 3, 0);
  append(batches[1], 2, 1);
  const auto norm = [&](float before) {
    Model model(1);
    for (size_t u = 0; u < model.transformer.registry().units().size(); ++u) {
      ops::run(model.stream, ops::Fill{.x = model.step.params().shard(static_cast<int>(u)).gradient,
                                       .value = before});
    }
    return model.step.run(batches, 1e-3).wait().grad_norm;
  };
  const double expected = norm(0.0f);
  EXPECT_GT(expected, 0);
  EXPECT_EQ(norm(std::numeric_limits<float>::quiet_NaN()), expected);
  EXPECT_EQ(norm(1e3f), expected);
}

// Without a plan every buffer has memory of its own, which nothing overwrites after its release.
// The planned pool is reused at once, and holds NaN in between.
TEST(TrainStep, ThePlannedPoolGivesTheSameBits) {
  std::vector<PackedBatch> batches(2);
  append(batches[0], 3, 0);
  append(batches[1], 2, 1);
  Model own(1);
  Model planned(1, /*planned=*/true);
  for (int i = 0; i < 3; ++i) {
    const StepResult a = own.step.run(batches, 1e-2).wait();
    const StepResult b = planned.step.run(batches, 1e-2).wait();
    EXPECT_TRUE(std::isfinite(a.loss));
    EXPECT_EQ(a.loss, b.loss);
    EXPECT_EQ(a.grad_norm, b.grad_norm);
    EXPECT_EQ(own.step.evaluate(batches[1]).loss, planned.step.evaluate(batches[1]).loss);
  }
}

TEST(TrainStep, OnTheCpuNothingIsRecorded) {
  std::vector<PackedBatch> batches(2);
  append(batches[0], 3, 0);
  append(batches[1], 2, 1);
  Config config = small_config(1);
  config.train.cuda_graph = CudaGraph::kOn;
  Model plain(1, /*planned=*/true);
  Model recorded(1, /*planned=*/true, make_single_process(), config);
  for (int i = 0; i < 3; ++i) {
    const StepResult a = plain.step.run(batches, 1e-2).wait();
    const StepResult b = recorded.step.run(batches, 1e-2).wait();
    EXPECT_EQ(a.loss, b.loss);
    EXPECT_EQ(a.grad_norm, b.grad_norm);
  }
}

// A task that labels as many tokens of a sequence as append(batch, 2, ...).
Config task_config(int64_t micro_batch) {
  Config config = small_config(micro_batch);
  config.data.task = {.type = TaskKind::kMqar, .pairs = kStepLength / 2};
  return config;
}

TEST(TrainStep, LogitsOfLabelledTokensAloneGiveTheSameStep) {
  PackedBatch full, sparse;  // all labels that there can be, and fewer
  append(full, 2, 0);
  append(full, 2, 1);
  append(sparse, 3, 2);
  append(sparse, 12, 3);
  const std::vector<PackedBatch> batches = {full, sparse};
  Model all(2);
  Model some(2, /*planned=*/true, make_single_process(), task_config(2));
  for (const PackedBatch& batch : batches) {
    const ValidationSums a = all.step.evaluate(batch);
    const ValidationSums b = some.step.evaluate(batch);
    EXPECT_NEAR(a.loss, b.loss, 1e-6 * a.loss);
    EXPECT_EQ(a.hits, b.hits);
    EXPECT_EQ(a.targets, b.targets);
  }
  for (int i = 0; i < 5; ++i) {
    const StepResult a = all.step.run(batches, 1e-2).wait();
    const StepResult b = some.step.run(batches, 1e-2).wait();
    EXPECT_NEAR(a.loss, b.loss, 1e-5 * a.loss);
    EXPECT_NEAR(a.grad_norm, b.grad_norm, 1e-4 * a.grad_norm);
  }
}

TEST(TrainStep, MoreLabelsThanTheTaskHasAreAnError) {
  PackedBatch batch;
  append(batch, 2, 0);
  batch.targets[0] = 1;
  ++batch.valid_targets;
  Model model(1, /*planned=*/false, make_single_process(), task_config(1));
  EXPECT_THROW(model.step.run({&batch, 1}, 0.0), Error);
}

TEST(TrainStep, HitsAreTheLabelsWithTheLargestLogit) {
  PackedBatch batch;
  append(batch, 2, 2);
  append(batch, 3, 3);
  Model model(2);
  const int64_t tokens = 2 * kStepLength;
  const test::Owned ids = test::integers(batch.tokens);
  const test::Owned positions = test::integers(batch.positions);
  const test::Owned cu_seqlens = test::integers(batch.cu_seqlens);
  const test::Owned targets = test::integers(batch.targets);
  const test::Owned logits = test::poisoned({tokens, kStepVocab});
  model.transformer.logits(model.stream, model.step.params(),
                           {.tokens_T = ids,
                            .targets_T = targets,
                            .sequences = {.cu_seqlens = cu_seqlens,
                                          .positions_T = positions,
                                          .count = 2,
                                          .max_seqlen = kStepLength}},
                           logits);
  // Half of the labels become the model's predictions, so that there are hits and misses.
  double hits = 0;
  for (int64_t t = 0; t < tokens; ++t) {
    int32_t& target = batch.targets[static_cast<size_t>(t)];
    if (target < 0) continue;
    const float* z = logits.f32() + t * kStepVocab;
    const auto likeliest = static_cast<int32_t>(std::max_element(z, z + kStepVocab) - z);
    if (t % 4 == 1) target = likeliest;
    hits += target == likeliest;
  }
  ASSERT_GT(hits, 5);
  ASSERT_LT(hits, static_cast<double>(batch.valid_targets) - 5);
  EXPECT_EQ(model.step.evaluate(batch).hits, hits);
}

}  // namespace
}  // namespace sbtrain
