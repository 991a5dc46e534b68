#include "parallel/network.h"

#include <gtest/gtest.h>

namespace sbtrain {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

// Round numbers, so that the times below can be computed by hand.
MachineConfig round_machine() {
  return {.nvlink_gbs = 100,
          .network_gbs = 10,
          .latency_us = 10,
          .hop_us = 1,
          .network_hop_us = 5,
          .stretch = 2,
          .interference = 0.1,
          .spread = 0.01};
}

TEST(Network, ARingInANodeMovesAllButOnePart) {
  const MachineConfig m = round_machine();
  // 3/4 of 400 MB at 100 GB/s, and 3 hops.
  const Transfer gather{Collective::kAllGather, {4, 1}, 400'000'000};
  EXPECT_NEAR(seconds(gather, m), 3e-3 + 13e-6, 1e-12);
  EXPECT_NEAR(seconds(gather, m, true), 6e-3 + 13e-6, 1e-12);
  // An all-reduce goes round twice.
  const Transfer reduce{Collective::kAllReduce, {4, 1}, 400'000'000};
  EXPECT_NEAR(seconds(reduce, m), 6e-3 + 16e-6, 1e-12);
  EXPECT_EQ(seconds({Collective::kAllGather, {1, 1}, 400}, m), 0);
}

TEST(Network, TheNetworkLimitsRingsAcrossNodes) {
  const MachineConfig m = round_machine();
  // Two nodes of four: 7/8 of 800 MB through four ports of 10 GB/s; 6 hops inside nodes, 1 across.
  const Transfer flat{Collective::kReduceScatter, {8, 2}, 800'000'000};
  EXPECT_NEAR(seconds(flat, m), 0.7 / 40 + 21e-6, 1e-12);
  EXPECT_NEAR(seconds(flat, m, true), 0.7 / 40 + 21e-6, 1e-12);  // NVLink still has time
  // Replicas, one on each node: one port, and no NVLink.
  const Transfer replicas{Collective::kAllReduce, {2, 2}, 100'000'000};
  EXPECT_NEAR(seconds(replicas, m), 0.1 / 10 + 20e-6, 1e-12);
}

// Two H200s: what was measured alone, of a block of 28M elements.
TEST(Network, TheDefaultsAreWithinFivePercentOfTwoGpus) {
  const MachineConfig m;
  EXPECT_NEAR(seconds({Collective::kAllGather, {2, 1}, 56 * kMiB}, m), 0.140e-3, 0.05 * 0.140e-3);
  EXPECT_NEAR(seconds({Collective::kReduceScatter, {2, 1}, 112 * kMiB}, m), 0.267e-3,
              0.05 * 0.267e-3);
}

Traffic gathers_and_a_reduction(int gathers) {
  Traffic traffic;
  for (int i = 0; i < gathers; ++i) {
    traffic.transfers.push_back({Collective::kAllGather, {4, 1}, 400'000'000});
  }
  traffic.transfers.push_back({Collective::kReduceScatter, {4, 1}, 400'000'000});
  traffic.transfers.push_back({Collective::kAllReduce, {4, 1}, 32});
  return traffic;
}

TEST(Network, ComputationHidesAllButTheEndsOfAStep) {
  const MachineConfig m = round_machine();
  const double one = 3e-3 + 13e-6;
  const double stretched = 6e-3 + 13e-6;
  const double small = 16e-6;
  const StepEstimate e = estimate_step(gathers_and_a_reduction(5), 1.0, m);
  EXPECT_EQ(e.compute, 1.0);
  EXPECT_NEAR(e.communication, 6 * one + small, 1e-8);
  EXPECT_NEAR(e.exposed, 2 * one + small, 1e-8);
  EXPECT_NEAR(e.interference, 0.1 * 4 * stretched, 1e-8);
  EXPECT_NEAR(e.total(), e.compute + e.exposed + e.interference, 1e-12);
}

TEST(Network, WhatComputationCannotHideIsExposed) {
  const MachineConfig m = round_machine();
  const double one = 3e-3 + 13e-6;
  const double stretched = 6e-3 + 13e-6;
  // Half of the four gathers in the middle run beside the computation, the rest after it.
  const StepEstimate e = estimate_step(gathers_and_a_reduction(5), 2 * stretched, m);
  EXPECT_NEAR(e.exposed, 2 * one + 16e-6 + 2 * one, 1e-8);
  EXPECT_NEAR(e.interference, 0.1 * 2 * stretched, 1e-8);
}

// Within the node, then across nodes: nothing is left to compute beside either.
TEST(Network, BothReductionsOfTheLastUnitAreExposed) {
  const MachineConfig m = round_machine();
  const Transfer gather{Collective::kAllGather, {4, 1}, 400'000'000};
  const Transfer within{Collective::kReduceScatter, {4, 1}, 400'000'000};
  const Transfer across{Collective::kAllReduce, {2, 2}, 100'000'000};
  const Traffic traffic{{gather, within, across, within, across}};
  const StepEstimate e = estimate_step(traffic, 1.0, m);
  EXPECT_NEAR(e.exposed, seconds(gather, m) + seconds(within, m) + seconds(across, m), 1e-12);
}

// What a step does once has one pass of one of its four micro-batches to run beside.
TEST(Network, WhatAStepDoesOnceIsHiddenByOnePass) {
  const MachineConfig m = round_machine();
  const Transfer across{Collective::kAllReduce, {2, 2}, 100'000'000};
  const Transfer within{Collective::kReduceScatter, {4, 1}, 400'000'000};
  const Transfer gather{Collective::kAllGather, {4, 1}, 400'000'000};
  // The backward pass lasts for half of two reductions, the forward pass for half of one gather.
  const double compute = 4 * 1.5 * seconds(across, m, true);
  const Traffic reductions{{gather, across, across, across}};
  const double ends = seconds(gather, m) + seconds(across, m);
  for (const Sharding sharding : {Sharding::kNone, Sharding::kHybrid}) {
    const StepEstimate e = estimate_step(reductions, compute, m, {sharding, 4});
    EXPECT_NEAR(e.exposed, ends + seconds(across, m), 1e-9);
    EXPECT_NEAR(e.interference, 0.1 * seconds(across, m, true), 1e-9);
  }
  EXPECT_NEAR(estimate_step(reductions, compute, m, {Sharding::kFull, 4}).exposed, ends, 1e-9);
  const Traffic gathers{{gather, gather, within}};
  const double little = 4 * 1.5 * seconds(gather, m, true);
  const StepEstimate grad = estimate_step(gathers, little, m, {Sharding::kGrad, 4});
  EXPECT_NEAR(grad.exposed, 1.5 * seconds(gather, m) + seconds(within, m), 1e-9);
  // Within a node every micro-batch of hybrid reduces.
  const Traffic inner{{gather, within, within, within}};
  EXPECT_NEAR(estimate_step(inner, 1.0, m, {Sharding::kHybrid, 4}).exposed,
              seconds(gather, m) + seconds(within, m), 1e-9);
}

// Matrices that travel after the sum of loss and norm have the update beside them, and not the
// passes of the model, which are over; weights that grad gathers have the next forward pass.
TEST(Network, WhatTheUpdateSendsIsHiddenByTheUpdate) {
  const MachineConfig m = round_machine();
  const Transfer gather{Collective::kAllGather, {4, 1}, 400'000'000};
  const Transfer reduction{Collective::kReduceScatter, {4, 1}, 400'000'000};
  const Transfer matrices{Collective::kAllToAll, {4, 1}, 400'000'000};
  const Transfer sum{Collective::kAllReduce, {4, 1}, 32};
  const Traffic without{{gather, gather, reduction, reduction, sum}};
  Traffic with = without;
  with.transfers.insert(with.transfers.end(), {matrices, matrices});
  const auto more = [&](const StepShape& shape) {
    const StepEstimate a = estimate_step(without, 1.0, m, shape);
    const StepEstimate b = estimate_step(with, 1.0, m, shape);
    return std::pair(b.exposed - a.exposed, b.interference - a.interference);
  };
  const double alone = seconds(matrices, m), beside = seconds(matrices, m, true);
  const auto nothing_beside = more({});
  EXPECT_NEAR(nothing_beside.first, 2 * alone, 1e-9);
  EXPECT_NEAR(nothing_beside.second, 0, 1e-12);
  const auto half = more({.update = beside});
  EXPECT_NEAR(half.first, alone, 1e-9);
  EXPECT_NEAR(half.second, 0.1 * beside, 1e-9);
  const auto all = more({.update = 3 * beside});
  EXPECT_NEAR(all.first, 0, 1e-9);
  EXPECT_NEAR(all.second, 0.1 * 2 * beside, 1e-9);
  const Traffic fetched{{gather, reduction, sum, gather}};
  EXPECT_NEAR(estimate_step(fetched, 1.0, m, {.sharding = Sharding::kGrad}).exposed,
              seconds(gather, m) + seconds(reduction, m) + seconds(sum, m), 1e-9);
}

// They slow nothing down and are not slowed; of the all-to-all each rank has a gather of its own.
TEST(Network, CopyEnginesLeaveTheProductsAlone) {
  const MachineConfig m = round_machine();
  const Transfer gather{Collective::kAllGather, {4, 1}, 400'000'000, /*copied=*/true};
  const Transfer exchange{Collective::kAllToAll, {4, 1}, 400'000'000, /*copied=*/true};
  const double one = 3e-3 + 13e-6;
  EXPECT_NEAR(seconds(gather, m, true), one, 1e-12);
  EXPECT_NEAR(seconds(exchange, m), 4 * one, 1e-12);
  EXPECT_NEAR(seconds(exchange, m, true), 4 * one, 1e-12);
  Traffic traffic{{gather, gather, exchange, exchange}};
  const StepEstimate e = estimate_step(traffic, 1.0, m);
  EXPECT_NEAR(e.exposed, one + 4 * one, 1e-9);  // the ends of the step
  EXPECT_EQ(e.interference, 0);
  EXPECT_NEAR(e.slowest, 0.01, 1e-12);
  EXPECT_NEAR(e.total(), 1.01 + 5 * one, 1e-9);
  // What kernels move beside them still costs.
  traffic.transfers.insert(traffic.transfers.begin() + 1,
                           {Collective::kShift, {4, 1}, 100'000'000});
  EXPECT_GT(estimate_step(traffic, 1.0, m).interference, 0);
}

TEST(Network, AStepWithoutCollectivesIsItsComputation) {
  EXPECT_EQ(estimate_step({}, 0.25, {}).total(), 0.25);
}

}  // namespace
}  // namespace sbtrain
