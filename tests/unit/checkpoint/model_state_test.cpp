#include "checkpoint/model_state.h"

#include <limits>

#include "checkpoint/snapshotter.h"
#include "fixtures.h"
#include "model/transformer.h"
#include "ops/memory.h"
#include "parallel/communicator.h"
#include "support/tensors.h"

namespace sbtrain {
namespace {

// Memory is not zero when it is allocated, and checkpoints do not hold the padding of odd widths.
TEST(ModelState, PaddingIsZeroAfterLoading) {
  ModelConfig config;
  config.layers = 1;
  config.width = 32;
  config.inner = 44;  // stored padded
  config.heads = 2;
  config.vocab = 61;
  const Transformer model(config);
  const std::unique_ptr<Communicator> communicator = make_single_process();
  const Mesh mesh(*communicator);
  test::CpuStream saved_cpu;
  ShardedParams saved(model.registry(), saved_cpu, mesh, make_optimizer());
  saved.initialize(3);
  Snapshotter snapshotter(saved);
  Snapshot snapshot;
  snapshotter.begin(snapshot);
  snapshot.state_json = "{}";
  const test::TemporaryFolder run;
  const CheckpointReader checkpoint(
      save_checkpoint(Storage(), run.path(), snapshot, RankGroup{}, 1).folder);

  test::CpuStream cpu;
  ShardedParams loaded(model.registry(), cpu, mesh, make_optimizer());
  const auto each = [&](ShardedParams& params, const auto& visit) {
    for (size_t u = 0; u < model.registry().units().size(); ++u) {
      const ShardedParams::Shard& shard = params.shard(static_cast<int>(u));
      visit(shard.weights);
      for (const StateRange& range : shard.ranges) {
        for (const Tensor& state : range.states) visit(state);
      }
    }
  };
  each(loaded, [&](const Tensor& t) {
    ops::run(cpu, ops::Fill{.x = t, .value = std::numeric_limits<float>::quiet_NaN()});
  });
  load_params(checkpoint, loaded, /*with_state=*/true);
  std::vector<Tensor> expected;
  each(saved, [&](const Tensor& t) { expected.push_back(t); });
  size_t n = 0;
  each(loaded, [&](const Tensor& t) { EXPECT_TRUE(test::bitwise_equal(t, expected[n++])); });
}

}  // namespace
}  // namespace sbtrain
