#include "checkpoint/snapshotter.h"

#include <gtest/gtest.h>

#include "fixtures.h"
#include "ops/memory.h"
#include "parallel/mesh.h"
#include "parallel/param_shards.h"

namespace sbtrain {
namespace {

class SnapshotterTest : public testing::Test {
 protected:
  // Padded rows, and a tensor larger than a piece of page-locked memory.
  SnapshotterTest() {
    const Init init = Init::constant(0.5);
    registry_.add_unit("a.", {{.name = "odd", .shape = {3, 5}, .storage = {3, 8}, .init = init},
                              {.name = "large", .shape = {kLarge}, .storage = {}, .init = init}});
    registry_.add_unit("b.", {{.name = "w", .shape = {100}, .storage = {}, .init = init}});
    params_.emplace(registry_, cpu_, mesh_, make_optimizer());
    params_->initialize(1);
  }

  // Adds to every weight and moment, as an update does.
  void change() {
    for (const TensorShard& shard : tensor_shards(*params_, /*with_state=*/true)) {
      ops::run(cpu_, ops::Add{.y = shard.stored, .x = shard.stored});
      shard.stored.f32()[0] += 1;
    }
  }
  static std::vector<std::vector<float>> values(const std::vector<TensorShard>& shards) {
    std::vector<std::vector<float>> all;
    for (const TensorShard& shard : shards) {
      all.emplace_back(shard.stored.f32(), shard.stored.f32() + shard.stored.numel());
    }
    return all;
  }

  static constexpr int64_t kLarge = PinnedMemory::kPiece / sizeof(float) + 1001;
  ParamRegistry registry_;
  Memory memory_{Backend::kCpu};
  Stream cpu_{memory_};
  const std::unique_ptr<Communicator> ranks_ = make_single_process();
  const Mesh mesh_{*ranks_};
  std::optional<ShardedParams> params_;
};

TEST_F(SnapshotterTest, HoldsTheStateOfItsBeginning) {
  Snapshotter snapshotter(*params_);
  for (int save = 0; save < 2; ++save) {
    change();
    const auto expected = values(tensor_shards(*params_, /*with_state=*/true));
    Snapshot snapshot;
    snapshotter.begin(snapshot);
    cpu_.wait(snapshotter.copied());
    change();
    snapshot.wait();
    EXPECT_TRUE(values(snapshot.tensors) == expected);
    for (const TensorShard& shard : snapshot.tensors) {
      EXPECT_EQ(shard.row_stride, shard.name == "a.odd" ? 8 : 0) << shard.name;
    }
  }
}

TEST_F(SnapshotterTest, TakesItsMemoryOnce) {
  Snapshotter snapshotter(*params_);
  EXPECT_GE(snapshotter.bytes(), static_cast<size_t>(3 * 4 * registry_.count()));
  Snapshot first;
  snapshotter.begin(first);
  Snapshot second;
  snapshotter.begin(second);
  EXPECT_EQ(first.memory, second.memory);
  EXPECT_EQ(first.tensors[0].stored.data, second.tensors[0].stored.data);
}

// The snapshot outlives the model: a save may still run when training ends.
TEST_F(SnapshotterTest, TheSnapshotKeepsItsValues) {
  const auto expected = values(tensor_shards(*params_, /*with_state=*/true));
  Snapshot snapshot;
  Snapshotter(*params_).begin(snapshot);
  params_.reset();
  snapshot.wait();
  EXPECT_TRUE(values(snapshot.tensors) == expected);
}

}  // namespace
}  // namespace sbtrain
