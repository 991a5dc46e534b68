// The copy that a save writes is made beside the work of the stream that trains.
#include "checkpoint/snapshotter.h"

#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "checkpoint/model_state.h"
#include "parallel/param_shards.h"
#include "support/gpu.h"
#include "support/process.h"

namespace sbtrain::test {
namespace {

class SnapshotterGpu : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    // Large enough that the copy takes milliseconds, and larger than a piece of page-locked memory.
    registry_.add_unit(
        "a.",
        {{.name = "odd", .shape = {3001, 4099}, .storage = {3001, 4104}, .init = Init::normal(1)},
         {.name = "large", .shape = {5000, 8000}, .storage = {}, .init = Init::normal(1)}});
    registry_.add_unit(
        "b.", {{.name = "small", .shape = {1000}, .storage = {}, .init = Init::constant(1)}});
    gpu_.emplace();
    params_.emplace(registry_, *gpu_, mesh_, make_optimizer());
    params_->initialize(1);
  }

  void change() {
    for (const TensorShard& shard : tensor_shards(*params_, /*with_state=*/true)) {
      ops::run(*gpu_, ops::Fill{.x = shard.stored.row_range(0, 1), .value = 3});
      ops::run(*gpu_, ops::Add{.y = shard.stored, .x = shard.stored});
    }
  }
  std::vector<std::vector<float>> values(ShardedParams& params) {
    std::vector<std::vector<float>> all;
    for (const TensorShard& shard : tensor_shards(params, /*with_state=*/true)) {
      all.emplace_back(static_cast<size_t>(shard.stored.numel()));
      ops::run(*gpu_, ops::CopyToHost{.host = all.back().data(), .x = shard.stored});
    }
    return all;
  }

  ParamRegistry registry_;
  const std::unique_ptr<Communicator> ranks_ = make_single_process();
  const Mesh mesh_{*ranks_};
  std::optional<GpuStream> gpu_;
  std::optional<ShardedParams> params_;
};

TEST_F(SnapshotterGpu, HoldsTheStateOfItsBeginning) {
  Snapshotter snapshotter(*params_);
  for (int save = 0; save < 3; ++save) {
    change();
    const auto expected = values(*params_);
    Snapshot snapshot;
    snapshotter.begin(snapshot);
    gpu_->stream.wait(snapshotter.copied());
    change();  // enqueued while the copy runs
    snapshot.wait();
    for (size_t i = 0; i < expected.size(); ++i) {
      const TensorShard& shard = snapshot.tensors[i];
      const float* copy = shard.stored.f32();
      EXPECT_TRUE(std::equal(expected[i].begin(), expected[i].end(), copy))
          << shard.kind << "/" << shard.name << ", save " << save;
    }
  }
}

TEST_F(SnapshotterGpu, ASavedStateIsLoadedWithEqualBits) {
  change();
  const auto expected = values(*params_);
  Snapshot snapshot;
  Snapshotter snapshotter(*params_);
  snapshotter.begin(snapshot);
  snapshot.state_json = "{}";
  const TemporaryFolder run;
  const auto folder = save_checkpoint(Storage(), run.path(), snapshot, RankGroup{}, 1).folder;

  ShardedParams loaded(registry_, *gpu_, mesh_, make_optimizer());
  load_params(CheckpointReader(folder, Verification::kOnRead), loaded, /*with_state=*/true);
  EXPECT_TRUE(values(loaded) == expected);
}

}  // namespace
}  // namespace sbtrain::test
