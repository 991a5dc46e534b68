#include "train/engines.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace sbtrain
