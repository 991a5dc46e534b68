#include "train/engines.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "parallel/make_communicator.h"

namespace sbtrain {
namespace {

using enum TransferEngine;

TEST(Engines, AutoIsWhatTheMachineHasAndGradientsGoAsTheWeights) {
  TrainConfig train;  // auto is the default of both
  EXPECT_EQ(with_engines(train, true).gather_engine, kCopyEngines);
  EXPECT_EQ(with_engines(train, true).reduce_engine, kCopyEngines);
  EXPECT_EQ(with_engines(train, false).gather_engine, kMultiprocessors);
  EXPECT_EQ(with_engines(train, false).reduce_engine, kMultiprocessors);
  train.gather_engine = kCopyEngines;
  EXPECT_EQ(with_engines(train, false).reduce_engine, kCopyEngines);
}

TEST(Engines, WhatIsNamedStays) {
  TrainConfig train;
  train.reduce_engine = kMultiprocessors;
  EXPECT_EQ(with_engines(train, true).reduce_engine, kMultiprocessors);
  train.gather_engine = train.reduce_engine = kCopyEngines;
  EXPECT_EQ(with_engines(train, false).gather_engine, kCopyEngines);
}

TEST(Engines, ARankOnTheCpuHasMultiprocessors) {
  const TrainConfig train;
  const Launch alone;
  const auto control = make_control(alone);
  const TrainConfig mine = with_engines(train, *control, alone, Backend::kCpu);
  EXPECT_EQ(mine.gather_engine, kMultiprocessors);
  EXPECT_EQ(mine.reduce_engine, kMultiprocessors);
}

TEST(Engines, WhatKeepsNcclFromOtherMemory) {
  EXPECT_TRUE(nccl_may_reach_other_gpus());
  struct Case {
    const char* name;
    const char* value;
    bool may;
  };
  for (const Case& c : {Case{"NCCL_P2P_DISABLE", "1", false}, Case{"NCCL_P2P_DISABLE", "0", true},
                        Case{"NCCL_CUMEM_ENABLE", "0", false}, Case{"NCCL_WIN_ENABLE", "0", false},
                        Case{"NCCL_WIN_ENABLE", "1", true}}) {
    ASSERT_EQ(setenv(c.name, c.value, 1), 0);
    EXPECT_EQ(nccl_may_reach_other_gpus(), c.may) << c.name << "=" << c.value;
    unsetenv(c.name);
  }
}

}  // namespace
}  // namespace sbtrain
