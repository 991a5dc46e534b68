// train.offload: activations: the same bits as without, in memory that the plan has counted.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "config/schema.h"
#include "core/error.h"
#include "core/host_memory.h"
#include "ops/pinned_copy.h"
#include "support/model.h"
#include "support/planned_step.h"
#include "train/plan.h"
#include "train/scale.h"
#include "train/step.h"

namespace sbtrain {
namespace {

constexpr int32_t kRow = 32;
constexpr int32_t kWords = 29;

Config offload_config(int64_t layers, const char* attention = "{type: stickbreaking}") {
  Config config;
  config.model.layers = layers;
  config.model.width = 16;
  config.model.inner = 24;
  config.model.heads = 2;
  config.model.vocab = kWords;
  config.model.init_std = 0.5;
  config.model.attention = {parse_attention(attention)};
  config.train.sequence_length = kRow;
  config.train.micro_batch = 2;
  config.train.batch = 6;
  config.train.recompute = Recompute::kFull;
  config.train.offload = Offload::kActivations;
  return config;
}

Config without(Config config) {
  config.train.offload = Offload::kNone;
  return config;
}

MemoryReport plan_of(const Config& config) {
  return plan_memory(config, Backend::kCpu);
}

struct Trained {
  std::vector<double> numbers;  // losses, norms and a validation loss
  std::vector<float> weights;
  size_t pool_bytes = 0;
  size_t host_bytes = 0;
};

// Three steps of three micro-batches, a validation between them.
Trained train(const Config& config, bool planned) {
  const Transformer model(config.model, config.train.recompute);
  const std::unique_ptr<Communicator> alone = make_single_process();
  const Mesh mesh(*alone);
  Memory memory(Backend::kCpu);
  memory.poison();
  if (planned) test::adopt_step_plan(memory, config, model, mesh);
  Stream stream(memory);
  TrainStep step(config, model, stream, mesh);
  step.params().initialize(3);
  Trained result;
  for (uint64_t n = 0; n < 3; ++n) {
    std::vector<PackedBatch> batches;
    for (uint64_t m = 0; m < 3; ++m) {
      batches.push_back(test::packed_batch({kRow, 5, kRow - 5}, kWords, 3 * n + m));
    }
    const StepResult seen = step.run(batches, 1e-2).wait();
    result.numbers.insert(result.numbers.end(), {seen.loss, seen.grad_norm});
    result.numbers.push_back(step.evaluate(batches[0]).loss);
  }
  for (size_t u = 0; u < model.registry().units().size(); ++u) {
    const Tensor& weights = step.params().shard(static_cast<int>(u)).weights;
    result.weights.insert(result.weights.end(), weights.f32(), weights.f32() + weights.numel());
  }
  result.pool_bytes = memory.report().pool_bytes;
  result.host_bytes = step.host_bytes();
  return result;
}

void expect_equal_bits(const Config& config, bool planned) {
  const Trained plain = train(without(config), planned);
  const Trained offloaded = train(config, planned);
  EXPECT_EQ(plain.numbers, offloaded.numbers);
  EXPECT_EQ(plain.weights, offloaded.weights);
  EXPECT_EQ(plain.host_bytes, 0U);
}

TEST(Offload, GivesTheSameBitsInEveryRecomputeMode) {
  for (const Recompute recompute : {Recompute::kNone, Recompute::kSelective, Recompute::kFull}) {
    for (const bool planned : {false, true}) {
      SCOPED_TRACE(fmt::format("{}{}", name_of(recompute), planned ? ", planned" : ""));
      Config config = offload_config(5);
      config.train.recompute = recompute;
      expect_equal_bits(config, planned);
    }
  }
}

TEST(Offload, GivesTheSameBitsForEveryNumberOfLayers) {
  for (const int64_t layers : {1, 2, 3, 4, 8}) {
    SCOPED_TRACE(layers);
    expect_equal_bits(offload_config(layers), /*planned=*/true);
  }
}

TEST(Offload, GivesTheSameBitsWithOtherModules) {
  for (const char* attention : {"{type: softmax}", "{type: softmax, position: fire, shared: true}",
                                "{type: coca}", "{type: rebased}"}) {
    SCOPED_TRACE(attention);
    expect_equal_bits(offload_config(4, attention), /*planned=*/true);
  }
  Config layout = offload_config(4);
  layout.model.norm_position = NormPosition::kOutput;
  layout.model.parallel_residual = true;
  expect_equal_bits(layout, /*planned=*/true);
}

// Of the inputs of 12 blocks three are on the device at the peak, which is in the backward pass of
// the last block: its own, that of the block in front of it, which is coming, and none else.
TEST(Offload, ThePlanHoldsTwoInputsAndTheHostTheOthers) {
  constexpr int64_t kLayers = 12;
  const Config config = offload_config(kLayers);
  const size_t input = size_t{2 * kRow * 16} * sizeof(float);
  const MemoryReport plain = plan_of(without(config));
  const MemoryReport offloaded = plan_of(config);
  const auto activations = [](const MemoryReport& report) {
    size_t most = 0;
    for (const MemoryReport::Program& program : report.programs) {
      most = std::max(most, program.at_peak[static_cast<int>(MemoryClass::kActivations)]);
    }
    return most;
  };
  EXPECT_EQ(activations(plain) - activations(offloaded), (kLayers - 2) * input);
  EXPECT_EQ(plain.pool_bytes - offloaded.pool_bytes, (kLayers - 2) * input);
  const Trained trained = train(config, /*planned=*/true);
  EXPECT_EQ(trained.host_bytes, (kLayers - 1) * input);
  EXPECT_EQ(trained.host_bytes, ActivationOffload::bytes_of(kLayers, 2 * kRow, 16, DType::kF32));
  EXPECT_EQ(trained.pool_bytes, offloaded.pool_bytes);
}

TEST(Offload, TheDryRunStatesBothMemories) {
  Config config = offload_config(24);
  config.model.width = 1024;
  config.model.heads = 16;
  config.train.sequence_length = 1 << 20;
  config.train.micro_batch = config.train.batch = 1;
  config.stages.resize(1);
  config.stages[0].length = {.count = 10, .unit = Duration::Unit::kSteps};
  const std::string text = describe_run(config, Backend::kCuda, {});
  EXPECT_NE(text.find("recompute full, offload activations\n"), std::string::npos) << text;
  EXPECT_NE(text.find("  of the host      46.00 GiB, page-locked: the inputs of blocks\n"),
            std::string::npos)
      << text;
  EXPECT_EQ(text.find("does not fit      a rank"), std::string::npos) << text;
  EXPECT_EQ(text.find("does not fit      train.offload keeps more in the host's memory than") !=
                std::string::npos,
            host_memory().free < size_t{46} << 30)
      << text;
  Config small_machine = without(config);
  small_machine.machine.memory_gib = 40;
  const std::string refused = describe_run(small_machine, Backend::kCuda, {});
  EXPECT_NE(refused.find("does not fit      a rank may use 38 of the 40 GiB"), std::string::npos)
      << refused;
  EXPECT_NE(refused.find("train.offload: activations makes it "), std::string::npos) << refused;
  EXPECT_NE(refused.find(" GiB, and 46.00 of the host's memory\n"), std::string::npos) << refused;
  Config shared = config;
  shared.train.batch = 2;
  const std::string two = describe_scale(shared, Backend::kCuda, {.world = 2});
  EXPECT_NE(two.find("each rank takes 46.00 GiB of the host's memory, page-locked, those of a node "
                     "92.00 (train.offload)"),
            std::string::npos)
      << two;
}

TEST(Offload, AHostWithoutTheMemoryIsNamed) {
  Memory memory(Backend::kCpu);
  Stream stream(memory);
  try {
    const ActivationOffload offload(stream, 1 << 10, int64_t{1} << 30, 1 << 10);
    FAIL() << "four petabytes were accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kOutOfMemory);
    const std::string message = error.what();
    EXPECT_NE(message.find("train.offload, which keeps the inputs of blocks in the host's memory, "
                           "needs 4190208.00 GiB"),
              std::string::npos)
        << message;
    EXPECT_NE(message.find("set train.offload: none"), std::string::npos) << message;
  }
}

// On a GPU no copy may cross a piece of the memory, which is page-locked piece by piece.
TEST(PinnedCopy, BringsBackWhatWentOverTheBordersOfPieces) {
  constexpr int64_t kCount = PinnedMemory::kPiece / sizeof(int32_t) + 1001;
  const size_t offset = PinnedMemory::kPiece - 77 * sizeof(int32_t);
  const PinnedMemory host(Backend::kCpu, 3 * PinnedMemory::kPiece, "the test");
  Memory memory(Backend::kCpu);
  Stream stream(memory);
  const Buffer x = memory.allocate(MemoryClass::kInputs, "x", DType::kI32, {kCount / 7, 7});
  const Buffer y = memory.allocate(MemoryClass::kInputs, "y", DType::kI32, {kCount / 7, 7});
  for (int64_t i = 0; i < x.tensor().numel(); ++i) {
    x.tensor().i32()[i] = static_cast<int32_t>(7 * i);
  }
  ops::copy_to_pinned(stream, host, offset, x);
  EXPECT_EQ(std::memcmp(host.data() + offset, x.tensor().data, x.tensor().bytes()), 0);
  ops::copy_from_pinned(stream, y, host, offset);
  EXPECT_EQ(std::memcmp(y.tensor().data, x.tensor().data, x.tensor().bytes()), 0);
}

}  // namespace
}  // namespace sbtrain
