#include "parallel/traffic.h"

#include <gtest/gtest.h>

#include "core/error.h"

namespace sbtrain {
namespace {

TEST(PlannedCommunicator, RecordsWhatAPlannedStepMoves) {
  Memory memory(Backend::kPlan);
  Stream s(memory);
  Traffic traffic;
  const auto ranks = make_planned(9, 1024, 8, &traffic);
  EXPECT_EQ(ranks->rank(), 9);
  EXPECT_EQ(ranks->world(), 1024);
  const auto node = ranks->split([](int rank) { return rank / 8; });
  const auto replicas = ranks->split([](int rank) { return rank % 8; });
  EXPECT_EQ(node->world(), 8);
  EXPECT_EQ(node->rank(), 1);
  EXPECT_EQ(replicas->world(), 128);
  EXPECT_EQ(replicas->rank(), 1);

  const Buffer full = s.allocate(MemoryClass::kWeights, "full", DType::kBF16, {8 * 100});
  const Buffer shard = s.allocate(MemoryClass::kWeights, "shard", DType::kBF16, {100});
  node->all_gather(s, full, shard);
  node->reduce_scatter(s, shard, full);
  replicas->all_reduce(s, shard);
  ranks->broadcast(s, full, 0);
  ASSERT_EQ(traffic.transfers.size(), 4U);
  const auto expect = [&](int index, Collective collective, GroupLayout group, int64_t bytes) {
    EXPECT_EQ(traffic.transfers[index].collective, collective);
    EXPECT_EQ(traffic.transfers[index].group, group);
    EXPECT_EQ(traffic.transfers[index].bytes, bytes);
  };
  expect(0, Collective::kAllGather, {8, 1}, 1600);
  expect(1, Collective::kReduceScatter, {8, 1}, 1600);
  expect(2, Collective::kAllReduce, {128, 128}, 200);
  expect(3, Collective::kBroadcast, {1024, 128}, 1600);
}

TEST(PlannedCommunicator, ChecksArgumentsAndRefusesRealStreams) {
  Memory plan(Backend::kPlan);
  Stream planned(plan);
  const auto ranks = make_planned(0, 4, 2, nullptr);
  const Buffer full = planned.allocate(MemoryClass::kWeights, "full", DType::kF32, {10});
  const Buffer shard = planned.allocate(MemoryClass::kWeights, "shard", DType::kF32, {2});
  EXPECT_THROW(ranks->all_gather(planned, full, shard), Error);
  Memory memory(Backend::kCpu);
  Stream real(memory);
  float x = 0;
  EXPECT_THROW(ranks->all_reduce(real, Tensor(&x, DType::kF32, {1})), Error);
  EXPECT_THROW(make_planned(4, 4, 2, nullptr), Error);
}

}  // namespace
}  // namespace sbtrain
