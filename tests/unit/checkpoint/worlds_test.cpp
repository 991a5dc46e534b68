// What a world of ranks saves, any other world loads with equal bits: weights, moments, padding.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <vector>

#include "checkpoint/model_state.h"
#include "checkpoint/snapshotter.h"
#include "checkpoint/stored_runs.h"
#include "fixtures.h"
#include "ops/memory.h"
#include "parallel/param_shards.h"
#include "support/tensors.h"
#include "support/thread_world.h"

namespace sbtrain {
namespace {

namespace fs = std::filesystem;
using namespace sbtrain::test;  // NOLINT

struct World {
  int ranks = 1;
  Sharding sharding = Sharding::kFull;
  int node_size = 1;
};

// Odd sizes, padded rows and columns, fused tensors, and units of which some ranks of a larger
// world own nothing but padding.
ParamRegistry registry_of(int shards) {
  ParamRegistry registry(shards);
  const Init init = Init::normal(1);
  registry.add_unit("embed.", {{.name = "w", .shape = {211, 37}, .storage = {}, .init = init}});
  registry.add_unit(
      "block.",
      {{.name = "norm", .shape = {37}, .storage = {}, .init = Init::constant(1)},
       {.name = "gate", .shape = {45, 37}, .storage = {48, 37}, .init = init},
       {.name = "up", .shape = {45, 37}, .storage = {48, 37}, .init = init, .fused = true},
       {.name = "down", .shape = {37, 45}, .storage = {37, 48}, .init = init}});
  registry.add_unit("tiny.", {{.name = "scale", .shape = {3}, .storage = {}, .init = init}});
  return registry;
}

// One rank of a world, with its share of the parameters.
struct Rank {
  RankGroup group;
  Mesh& mesh;
  ShardedParams& params;
  Stream& stream;
};

// Runs body for every rank of the world, each on its own thread.
void run_world(const World& world, const std::function<void(const Rank&)>& body) {
  auto communicators = ThreadRank::make(world.ranks);
  run_ranks(world.ranks, [&](const RankGroup& group) {
    const std::unique_ptr<Communicator> ranks = std::move(communicators[group.rank]);
    Mesh mesh(*ranks, world.sharding, world.node_size);
    const ParamRegistry registry = registry_of(mesh.shard_count());
    CpuStream cpu;
    ShardedParams params(registry, cpu, mesh, make_optimizer());
    body({group, mesh, params, cpu.stream});
  });
}

std::vector<Tensor> arrays(const Rank& rank) {
  std::vector<Tensor> all;
  for (size_t u = 0; u < rank.params.registry().units().size(); ++u) {
    const ShardedParams::Shard& shard = rank.params.shard(static_cast<int>(u));
    all.push_back(shard.weights);
    for (const StateRange& range : shard.ranges) {
      all.insert(all.end(), range.states.begin(), range.states.end());
    }
  }
  return all;
}

// Gives every logical element of weights and moments a value of its own, and the padding zero.
void set_values(const Rank& rank) {
  for (const Tensor& array : arrays(rank)) ops::run(rank.stream, ops::Fill{.x = array, .value = 0});
  for (const TensorShard& shard : tensor_shards(rank.params, /*with_state=*/true)) {
    const std::string key = shard.name + shard.kind;
    for_each_stored_run(
        shard, shard.begin, shard.end, [&](int64_t logical, int64_t stored, int64_t count) {
          for (int64_t i = 0; i < count; ++i) {
            shard.stored.f32()[stored + i] = test_value(5, key, shard.begin + logical + i);
          }
        });
  }
}

std::vector<std::vector<float>> memory_of(const Rank& rank) {
  std::vector<std::vector<float>> copies;
  for (const Tensor& array : arrays(rank)) {
    copies.emplace_back(array.f32(), array.f32() + array.numel());
  }
  return copies;
}

SavedCheckpoint save(const Rank& rank, const fs::path& run, int64_t step,
                     const Storage& storage = Storage()) {
  Snapshotter snapshotter(rank.params);
  Snapshot snapshot;
  snapshotter.begin(snapshot);
  snapshot.step = step;
  snapshot.state_json = "{}";
  return save_checkpoint(storage, run, snapshot, rank.group, 1);
}

// Loads the newest checkpoint into memory that holds NaN, and compares every bit of weights,
// moments and padding.
void expect_loaded(const Rank& rank, const fs::path& run, int64_t step) {
  const auto use = [&](const CheckpointReader& reader) {
    load_shards(reader, rank.params, /*with_state=*/true);
  };
  const auto reader = open_newest(run, nullptr, use, rank.group);
  ASSERT_TRUE(reader);
  EXPECT_EQ(reader->manifest().step, step);
  rank.params.refresh();
  const auto loaded = memory_of(rank);
  set_values(rank);
  const auto expected = memory_of(rank);
  ASSERT_EQ(loaded.size(), expected.size());
  for (size_t i = 0; i < loaded.size(); ++i) {
    EXPECT_TRUE(same_bits(loaded[i], expected[i]))
        << "array " << i << " of rank " << rank.group.rank;
  }
}

TEST(Worlds, EveryWorldContinuesWhatAnotherSaved) {
  const TemporaryFolder run;
  const World worlds[] = {{4},
                          {2},
                          {1},
                          {4, Sharding::kGrad},
                          {4, Sharding::kHybrid, 2},
                          {3, Sharding::kNone},
                          {16},
                          {6, Sharding::kHybrid, 3},
                          {4}};
  int64_t step = 1;
  run_world(worlds[0], [&](const Rank& rank) {
    set_values(rank);
    save(rank, run.path(), step);
  });
  for (const World& world : worlds) {
    SCOPED_TRACE(fmt::format("{} ranks, step {}", world.ranks, step));
    run_world(world, [&](const Rank& rank) {
      expect_loaded(rank, run.path(), step);
      save(rank, run.path(), step + 1);
    });
    ++step;
    const auto reader = open_newest(run.path());
    ASSERT_TRUE(reader);
    EXPECT_TRUE(verify_checkpoint(reader->folder()).empty());
    EXPECT_EQ(reader->manifest().world, world.ranks);
    // Ranks that hold the same shard write a part of it each.
    const auto names = folder_names(reader->folder());
    const auto shards = std::count_if(names.begin(), names.end(),
                                      [](const auto& name) { return name.starts_with("rank-"); });
    EXPECT_EQ(shards, world.ranks);
    if (testing::Test::HasFailure()) return;
  }
}

TEST(Worlds, AFullDiskOnOneRankFailsAllAndKeepsTheOldCheckpoint) {
  const TemporaryFolder run;
  run_world({4}, [&](const Rank& rank) {
    set_values(rank);
    save(rank, run.path(), 1);
    const Storage full([&](std::string_view operation, const fs::path&) {
      return rank.group.rank == 2 && operation == "reserve" ? ENOSPC : 0;
    });
    const std::string message =
        error_of(ExitCode::kStorage, [&] { save(rank, run.path(), 2, full); });
    EXPECT_NE(message.find("rank 2"), std::string::npos) << message;
    EXPECT_NE(message.find("No space left"), std::string::npos) << message;
  });
  EXPECT_EQ(folder_names(run.path() / "checkpoints"),
            (std::vector<std::string>{"latest", "step-00000001"}));
  run_world({2}, [&](const Rank& rank) { expect_loaded(rank, run.path(), 1); });
}

// A shard that only one rank reads is damaged: no rank goes on with the checkpoint.
TEST(Worlds, DamageThatOneRankReadsIsRefusedByAll) {
  const TemporaryFolder run;
  for (const int64_t step : {1, 2}) {
    run_world({4}, [&](const Rank& rank) {
      set_values(rank);
      Snapshotter snapshotter(rank.params);
      Snapshot snapshot;
      snapshotter.begin(snapshot);
      snapshot.step = step;
      snapshot.state_json = "{}";
      save_checkpoint(Storage(), run.path(), snapshot, rank.group, 2);
    });
  }
  const fs::path file = run.path() / "checkpoints/step-00000002/rank-00003-of-00004.safetensors";
  std::string text = read_file(file);
  text.back() ^= 1;
  rewrite(file, text);
  run_world({2, Sharding::kGrad}, [&](const Rank& rank) { expect_loaded(rank, run.path(), 1); });
}

}  // namespace
}  // namespace sbtrain
