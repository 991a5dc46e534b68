#include "train/guard.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "core/error.h"

namespace sbtrain {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

TEST(Guard, AcceptsFiniteStepsHoweverLarge) {
  Guard guard(1);
  EXPECT_TRUE(guard.accept(1, 8.3, 1.0, 1e-3));
  EXPECT_TRUE(guard.accept(2, 1e30, 1e300, 1e-3));
  EXPECT_TRUE(guard.accept(3, 0.0, 0.0, 0.0));
  EXPECT_EQ(guard.state(), (GuardState{0, 0}));
}

TEST(Guard, SkipsWhateverIsNotFinite) {
  for (const double bad : {kNan, -kNan, kInf, -kInf}) {
    Guard guard(10);
    EXPECT_FALSE(guard.accept(1, bad, 1.0, 1e-3));
    EXPECT_FALSE(guard.accept(2, 8.0, bad, 1e-3));
    EXPECT_FALSE(guard.accept(3, bad, bad, 1e-3));
    EXPECT_EQ(guard.state(), (GuardState{3, 3}));
  }
}

TEST(Guard, AFiniteStepEndsTheRowButNotTheCount) {
  Guard guard(3);
  for (int i = 0; i < 20; ++i) {
    EXPECT_FALSE(guard.accept(3 * i, kNan, 1.0, 1e-3));
    EXPECT_FALSE(guard.accept(3 * i + 1, 1.0, kInf, 1e-3));
    EXPECT_TRUE(guard.accept(3 * i + 2, 1.0, 1.0, 1e-3));
  }
  EXPECT_EQ(guard.state(), (GuardState{40, 0}));
}

TEST(Guard, GivesUpAtTheLimitAndSaysWhatToDo) {
  Guard guard(3);
  EXPECT_TRUE(guard.accept(99, 2.5, 1.0, 0.004));
  EXPECT_FALSE(guard.accept(100, kNan, 1.0, 0.005));
  EXPECT_FALSE(guard.accept(101, kNan, 1.0, 0.005));
  try {
    guard.accept(102, kNan, 4.0, 0.005);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kDiverged);
    const std::string message = error.what();
    for (const char* part : {"step 102: loss nan, gradient norm 2 at lr 0.005", "3 bad steps",
                             "last applied step was 99 with loss 2.5000 at lr 0.004", "train.lr",
                             "--checkpoint.resume"}) {
      EXPECT_NE(message.find(part), std::string::npos) << part << " in: " << message;
    }
  }
}

// A NaN that a processor computes has its sign set, and a mean of f32 losses has 16 digits.
TEST(Guard, ShowsNumbersAsAReaderWants) {
  const auto message = [](double loss, double squared_norm) {
    try {
      Guard(1).accept(7, loss, squared_norm, 0.001);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_TRUE(message(-kNan, -kNan).starts_with("step 7: loss nan, gradient norm nan at lr"));
  EXPECT_TRUE(message(kInf, 2.0).starts_with("step 7: loss inf, gradient norm 1.41421 at lr"));
  EXPECT_TRUE(message(-kInf, kInf).starts_with("step 7: loss -inf, gradient norm inf at lr"));
  EXPECT_TRUE(message(10.0 / 3, kInf).starts_with("step 7: loss 3.33333, gradient norm inf at"));
}

TEST(Guard, SpikesCountApartButEndTheRunAlike) {
  const RunningLoss running{.count = 100, .mean = 3.25, .variance = 0.0625};
  Guard guard(3);
  EXPECT_FALSE(guard.accept(1, 9.0, 1.0, 1e-3, &running));
  EXPECT_EQ(guard.state(), (GuardState{.in_a_row = 1, .spikes = 1, .spike = true}));
  EXPECT_FALSE(guard.state().not_finite());
  EXPECT_FALSE(guard.accept(2, kNan, 1.0, 1e-3, &running));
  EXPECT_EQ(guard.state(), (GuardState{.skipped = 1, .in_a_row = 2, .spikes = 1}));
  EXPECT_TRUE(guard.state().not_finite());
  try {
    guard.accept(3, 9.0, 1.0, 1e-3, &running);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kDiverged);
    const std::string message = error.what();
    EXPECT_NE(message.find("spike (running mean 3.2500, standard deviation 0.2500)"),
              std::string::npos)
        << message;
    EXPECT_NE(message.find("last-good"), std::string::npos) << message;
  }
  EXPECT_TRUE(Guard(3, guard.state()).accept(4, 3.0, 1.0, 1e-3));
}

TEST(Guard, AResumedRunGivesUpAtTheSameStep) {
  Guard guard(3, {.skipped = 7, .in_a_row = 2});
  EXPECT_THROW(guard.accept(1, kNan, 1.0, 1e-3), Error);
  EXPECT_EQ(guard.state(), (GuardState{8, 3}));
}

}  // namespace
}  // namespace sbtrain
