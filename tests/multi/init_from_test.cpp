// A run that begins with other weights (train --init-from) has the same ones for any number of
// ranks and whatever they share: on the CPU, started by mpirun.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>

#include "checkpoint/weight_match.h"
#include "export/hf_folder.h"
#include "support/process.h"

namespace sbtrain::test {
namespace {

namespace fs = std::filesystem;
using Values = std::map<std::string, std::vector<float>>;

Values values_of(const WeightSource& source) {
  Values values;
  for (const std::string& name : source.names()) {
    int64_t count = 1;
    for (const int64_t size : source.shape(name)) count *= size;
    std::vector<float>& tensor = values[name];
    tensor.resize(static_cast<size_t>(count));
    source.read(name, 0, count, tensor.data());
  }
  return values;
}

// A model shaped like Qwen3, whose projections are wider than the model. Shards of its
// 1-dimensional and fused tensors begin and end inside of them.
fs::path pretrained() {
  return fs::path(SBTRAIN_TEST_MODELS) / "qwen3";
}

const std::string kConfig = R"(name: init
device: cpu
train: {sequence_length: 32, micro_batch: 1, batch: 12, lr: 0}
data: {task: {type: mqar, pairs: 4, examples: 64, eval_examples: 4}}
stages: [{name: a, length: 1 steps}]
metrics: {progress: false, tensorboard: false}
model:
  {layers: 2, width: 32, inner: 56, heads: 4, kv_heads: 2, head_dim: 16, vocab: 96, norm_eps: 1e-6,
   attention: )";
const std::string kAttention = "{type: softmax, rope_base: 1000000, qk_norm: true}";

class InitFrom : public testing::TestWithParam<std::tuple<int, std::string>> {
 protected:
  int world() const { return std::get<0>(GetParam()); }
  const std::string& sharding() const { return std::get<1>(GetParam()); }

  // One step at a learning rate of 0 by `world` ranks, with the weights at `source`.
  fs::path train(const std::string& name, const fs::path& source, int world,
                 const std::string& attention = kAttention,
                 const std::vector<std::string>& more = {}) {
    const fs::path config = folder_ / (name + ".yaml");
    write_file(config, kConfig + attention + "}\n");
    fs::path run = folder_ / name;
    std::vector<std::string> line = {SBTRAIN_MPIRUN,
                                     "--oversubscribe",
                                     "--allow-run-as-root",
                                     "-n",
                                     std::to_string(world),
                                     SBTRAIN_BINARY,
                                     "train",
                                     "--config",
                                     config,
                                     "--out",
                                     run,
                                     "--train.sharding=" + sharding(),
                                     "--init-from",
                                     source};
    line.insert(line.end(), more.begin(), more.end());
    Process process(line, folder_ / (name + ".log"), rank_environment());
    EXPECT_EQ(process.wait(), 0) << process.output();
    return run;
  }

  static Values weights_of(const fs::path& run) {
    return values_of(CheckpointWeights(open_checkpoint(run)));
  }

  TemporaryFolder folder_;
};

INSTANTIATE_TEST_SUITE_P(Worlds, InitFrom,
                         testing::Combine(testing::Values(1, 2, 4),
                                          testing::Values("full", "grad", "none")),
                         [](const auto& info) {
                           return fmt::format("{}_{}", std::get<0>(info.param),
                                              std::get<1>(info.param));
                         });

TEST_P(InitFrom, RanksReadTheirPartsOfTheWeights) {
  const Values expected = values_of(HfFolder(pretrained()));
  EXPECT_GT(expected.size(), 20U);
  const fs::path run = train("first", pretrained(), world());
  EXPECT_EQ(weights_of(run), expected);
  // From the checkpoint that these ranks have written, by another number of them.
  EXPECT_EQ(weights_of(train("second", run, world() == 2 ? 3 : 2)), expected);
}

// Tensors that the weights lack are those that a single rank initialises.
TEST_P(InitFrom, WhatIsMissingIsInitialisedAlike) {
  const std::string attention = "{type: stickbreaking, head_norm: true, qk_norm: true}";
  const std::vector<std::string> more = {"--model.tied=false", "--init-from-missing=initialise"};
  const Values alone = weights_of(train("alone", pretrained(), 1, attention, more));
  EXPECT_TRUE(alone.contains("lm_head.weight"));
  EXPECT_EQ(weights_of(train("together", pretrained(), world(), attention, more)), alone);
}

}  // namespace
}  // namespace sbtrain::test
