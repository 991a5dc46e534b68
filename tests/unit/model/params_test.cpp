#include "model/params.h"

#include <gtest/gtest.h>

#include <map>
#include <vector>

#include "core/philox.h"
#include "support/tensors.h"

namespace sbtrain {
namespace {

// The initial values of storage [begin, end) of the unit.
std::vector<float> initial_values(const ParamUnit& unit, int64_t begin, int64_t end,
                                  uint64_t seed) {
  test::CpuStream s;
  std::vector<float> values(static_cast<size_t>(end - begin), 9.0f);
  initialize(unit, begin, seed, s, Tensor(values.data(), DType::kF32, {end - begin}));
  return values;
}

ParamUnit padded_unit(ParamRegistry& registry) {
  const int unit = registry.add_unit(
      "layer.", {{.name = "norm", .shape = {5}, .storage = {}, .init = Init::constant(1)},
                 {.name = "down", .shape = {3, 5}, .storage = {3, 8}, .init = Init::normal(0.5)},
                 {.name = "gate", .shape = {5, 3}, .storage = {8, 3}, .init = Init::normal(2.0)},
                 {.name = "up",
                  .shape = {5, 3},
                  .storage = {8, 3},
                  .init = Init::normal(2.0),
                  .fused = true}});
  return registry.unit(unit);
}

TEST(Params, CountsLogicalElements) {
  ParamRegistry registry;
  padded_unit(registry);
  EXPECT_EQ(registry.count(), 5 + 15 + 15 + 15);
  EXPECT_EQ(registry.storage() % 64, 0);
}

TEST(Params, FusedTensorsAreOneMatrix) {
  ParamRegistry registry;
  const ParamUnit unit = padded_unit(registry);
  std::vector<float> flat(unit.size);
  for (size_t i = 0; i < flat.size(); ++i) flat[i] = static_cast<float>(i);
  const Weights weights = registry.view(0, Tensor(flat.data(), DType::kF32, {unit.size}));
  const Tensor fused = weights.fused("gate", 2);
  EXPECT_EQ(fused.rows(), 16);
  EXPECT_EQ(fused.data, weights.at("gate").data);
  EXPECT_EQ(fused.f32() + 8 * 3, weights.at("up").f32());
}

TEST(Params, PaddingStartsAtZeroAndValuesIgnoreIt) {
  ParamRegistry registry;
  const ParamUnit unit = padded_unit(registry);
  const std::vector<float> flat = initial_values(unit, 0, unit.size, 7);
  const Philox random(7, RandomPurpose::kInit, "layer.down");
  const float* down = flat.data() + unit.tensors[1].offset;
  for (int r = 0; r < 3; ++r) {
    for (int c = 0; c < 8; ++c) {
      const float expected =
          c < 5 ? static_cast<float>(0.5 * random.normal(static_cast<uint64_t>(r * 5 + c))) : 0.0f;
      EXPECT_EQ(down[r * 8 + c], expected) << r << "," << c;
    }
  }
  const float* gate = flat.data() + unit.tensors[2].offset;
  for (int i = 15; i < 24; ++i) EXPECT_EQ(gate[i], 0.0f);
}

TEST(Params, InitialValuesAreTheSameForEverySharding) {
  for (const int world : {1, 2, 4, 8}) {
    ParamRegistry registry(world);
    const ParamUnit unit = padded_unit(registry);
    ASSERT_EQ(unit.size % world, 0);
    const std::vector<float> whole = initial_values(unit, 0, unit.size, 3);
    const int64_t part = unit.size / world;
    for (int rank = 0; rank < world; ++rank) {
      const std::vector<float> shard = initial_values(unit, rank * part, (rank + 1) * part, 3);
      for (int64_t i = 0; i < part; ++i) ASSERT_EQ(shard[i], whole[rank * part + i]);
    }
  }
}

// Every logical element lies in exactly one run of one shard, at the place given by the shape, and
// a shard's logical elements are one contiguous range.
TEST(Params, ShardsCoverEveryLogicalElementOnce) {
  ParamRegistry registry;
  const ParamUnit unit = padded_unit(registry);
  for (const PlacedTensor& tensor : unit.tensors) {
    for (const int64_t part : {1, 7, 16, 64}) {
      std::map<int64_t, int64_t> storage_of;
      int64_t next = 0;
      for (int64_t begin = -3; begin < tensor.stored + 9; begin += part) {
        const LogicalRange range = logical_range(tensor, begin, begin + part);
        EXPECT_EQ(range.begin, next);
        next = range.end;
        int64_t in_runs = 0;
        for_each_run(tensor, begin, begin + part, [&](const ElementRun& run) {
          in_runs += run.count;
          for (int64_t i = 0; i < run.count; ++i) {
            EXPECT_TRUE(storage_of.emplace(run.logical + i, run.storage + i).second);
            EXPECT_GE(run.logical + i, range.begin);
            EXPECT_LT(run.logical + i, range.end);
          }
        });
        EXPECT_EQ(in_runs, range.end - range.begin);
      }
      EXPECT_EQ(static_cast<int64_t>(storage_of.size()), tensor.count) << tensor.name;
      EXPECT_EQ(next, tensor.count);
    }
  }
}

}  // namespace
}  // namespace sbtrain
