#include "optim/schedule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

#include "core/error.h"

namespace sbtrain {
namespace {

constexpr int64_t kTokens = 1024;  // per step

Duration in_steps(int64_t count) {
  return {count, Duration::Unit::kSteps};
}
Duration in_tokens(int64_t count) {
  return {count, Duration::Unit::kTokens};
}

ScheduleStage make_stage(ScheduleKind type, int64_t steps, int64_t warmup = 0) {
  ScheduleStage stage;
  stage.name = name_of(type);
  stage.length = in_steps(steps);
  stage.schedule.type = type;
  stage.schedule.warmup = in_steps(warmup);
  return stage;
}

Schedule make_schedule(const std::vector<ScheduleStage>& stages, double peak = 1.0,
                       int64_t batch = 4) {
  return Schedule(stages, peak, batch, kTokens);
}

std::string config_error(const std::vector<ScheduleStage>& stages) {
  try {
    make_schedule(stages);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kConfig);
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

TEST(Schedule, ConstantStaysAtThePeak) {
  const Schedule schedule = make_schedule({make_stage(ScheduleKind::kConstant, 10)}, 3e-4);
  for (int64_t step = 0; step < 20; ++step) EXPECT_EQ(schedule.lr(step), 3e-4);
  EXPECT_EQ(schedule.total_steps(), 10);
  EXPECT_EQ(schedule.total_tokens(), 10 * kTokens);
}

TEST(Schedule, WarmupRisesLinearlyFromTheFirstStepToThePeak) {
  for (const ScheduleKind type :
       {ScheduleKind::kConstant, ScheduleKind::kLinear, ScheduleKind::kCosine, ScheduleKind::kWsd,
        ScheduleKind::kExponential}) {
    const Schedule schedule = make_schedule({make_stage(type, 100, 10)});
    for (int64_t step = 0; step < 10; ++step) {
      EXPECT_DOUBLE_EQ(schedule.lr(step), static_cast<double>(step + 1) / 10)
          << name_of(type) << step;
    }
    EXPECT_DOUBLE_EQ(schedule.lr(10), 1.0) << name_of(type);
  }
}

TEST(Schedule, LinearCountsFromTheEndOfTheWarmup) {
  ScheduleStage stage = make_stage(ScheduleKind::kLinear, 110, 10);
  stage.schedule.final_ratio = 0.2;
  const Schedule schedule = make_schedule({stage});
  EXPECT_DOUBLE_EQ(schedule.lr(10), 1.0);
  EXPECT_DOUBLE_EQ(schedule.lr(60), 0.6);
  EXPECT_DOUBLE_EQ(schedule.lr(109), 1.0 - 0.99 * 0.8);
  EXPECT_DOUBLE_EQ(schedule.lr(110), 0.2);
  EXPECT_DOUBLE_EQ(schedule.lr(100000), 0.2);
}

TEST(Schedule, CosineCountsFromTheEndOfTheWarmup) {
  ScheduleStage stage = make_stage(ScheduleKind::kCosine, 110, 10);
  stage.schedule.final_ratio = 0.1;
  const Schedule schedule = make_schedule({stage});
  EXPECT_DOUBLE_EQ(schedule.lr(10), 1.0);
  EXPECT_DOUBLE_EQ(schedule.lr(35), 0.1 + 0.9 * 0.5 * (1.0 + std::sqrt(0.5)));
  EXPECT_DOUBLE_EQ(schedule.lr(60), 0.55);
  EXPECT_DOUBLE_EQ(schedule.lr(110), 0.1);
}

TEST(Schedule, WsdIsStableThenFallsLinearly) {
  ScheduleStage stage = make_stage(ScheduleKind::kWsd, 100, 10);
  stage.schedule.decay_fraction = 0.2;
  stage.schedule.final_ratio = 0.5;
  const Schedule schedule = make_schedule({stage});
  for (int64_t step = 10; step <= 80; ++step) EXPECT_EQ(schedule.lr(step), 1.0);
  EXPECT_DOUBLE_EQ(schedule.lr(90), 0.75);
  EXPECT_DOUBLE_EQ(schedule.lr(100), 0.5);
}

TEST(Schedule, WsdDecayIsNotLengthenedByBinaryFractions) {
  ScheduleStage stage = make_stage(ScheduleKind::kWsd, 100);
  stage.schedule.decay_fraction = 0.07;  // 0.07 * 100 = 7.000000000000001
  const Schedule schedule = make_schedule({stage});
  EXPECT_EQ(schedule.lr(93), 1.0);
  EXPECT_LT(schedule.lr(94), 1.0);
}

// The learning rate of the 1B and 3B recipe: batch 1024 of 4096 tokens, lr = min(cap, a B n^b).
TEST(Schedule, PowerMeetsTheVectorsOfTheRecipe) {
  constexpr int64_t kRecipeTokens = 1024 * 4096;
  ScheduleStage stage = make_stage(ScheduleKind::kPower, 0);
  stage.length = in_tokens(2'000'000'000'000);
  const auto at_tokens = [&](double cap, double tokens) {
    const Schedule schedule({stage}, cap, 1024, kRecipeTokens);
    return schedule.lr(static_cast<int64_t>(std::llround(tokens / kRecipeTokens)));
  };
  EXPECT_NEAR(at_tokens(0.02, 1e12), 3.107e-3, 0.5e-6);
  EXPECT_EQ(at_tokens(0.02, 25.95e9), 0.02);
  EXPECT_LT(at_tokens(0.02, 25.97e9), 0.02);
  EXPECT_EQ(at_tokens(0.01, 101.06e9), 0.01);
  EXPECT_LT(at_tokens(0.01, 101.08e9), 0.01);
}

TEST(Schedule, PowerCountsTheTokensOfEarlierStages) {
  ScheduleStage power = make_stage(ScheduleKind::kPower, 1000);
  const Schedule whole = make_schedule({power}, 1.0, 4);  // the cap binds at 0 tokens only
  ScheduleStage half = make_stage(ScheduleKind::kPower, 500);
  const Schedule split = make_schedule({half, half}, 1.0, 4);
  for (int64_t step = 0; step < 1000; step += 37) EXPECT_EQ(whole.lr(step), split.lr(step));
}

TEST(Schedule, PowerWarmupEndsAtTheCurve) {
  ScheduleStage stage = make_stage(ScheduleKind::kPower, 1000, 100);
  const Schedule schedule = make_schedule({stage}, 1.0, 4);  // the cap never binds after step 0
  const double reached = 4.0 * 4.0 * std::pow(100.0 * kTokens, -0.51);
  EXPECT_DOUBLE_EQ(schedule.lr(100), reached);
  EXPECT_DOUBLE_EQ(schedule.lr(99), reached);
  EXPECT_DOUBLE_EQ(schedule.lr(49), reached / 2);
}

TEST(Schedule, ExponentialStartsAtScaleAndEndsAtDelta) {
  for (const double delta : {0.0, 0.1, 0.5}) {
    ScheduleStage stage = make_stage(ScheduleKind::kExponential, 100);
    stage.schedule.final_ratio = delta;
    stage.schedule.scale = 0.5;
    const Schedule schedule = make_schedule({stage}, 0.02);
    EXPECT_NEAR(schedule.lr(0), 0.01, 1e-15);
    EXPECT_NEAR(schedule.lr(100), 0.01 * delta, 1e-15);
    EXPECT_EQ(schedule.lr(5000), schedule.lr(100));  // clamped at x = t
    const double e = std::numbers::e;
    EXPECT_NEAR(schedule.lr(50),
                0.01 * ((1 - delta) * e / (e - 1) * std::exp(-0.5) + (delta * e - 1) / (e - 1)),
                1e-15);
    for (int64_t step = 0; step < 100; ++step) EXPECT_GT(schedule.lr(step), schedule.lr(step + 1));
  }
}

TEST(Schedule, PowerThenExponentialIsContinuousAtTheSwitch) {
  ScheduleStage power = make_stage(ScheduleKind::kPower, 1000, 50);
  ScheduleStage exponential = make_stage(ScheduleKind::kExponential, 200);
  const Schedule schedule = make_schedule({power, exponential}, 2e-2, 4);
  const Schedule longer = make_schedule({make_stage(ScheduleKind::kPower, 1100, 50)}, 2e-2, 4);
  EXPECT_DOUBLE_EQ(schedule.lr(1000), longer.lr(1000));
  EXPECT_LT(schedule.lr(999), 2e-2);  // below the cap: the decay starts from the power law
  EXPECT_NEAR(schedule.lr(1200), 0.0, 1e-18);
  for (int64_t step = 50; step < 1199; ++step) {
    EXPECT_GE(schedule.lr(step), schedule.lr(step + 1));
    EXPECT_LT(schedule.lr(step) - schedule.lr(step + 1), 0.01 * schedule.lr(51)) << step;
  }
}

TEST(Schedule, CurvesHaveNoJumpInsideAStage) {
  for (const ScheduleKind type : {ScheduleKind::kLinear, ScheduleKind::kCosine, ScheduleKind::kWsd,
                                  ScheduleKind::kPower, ScheduleKind::kExponential}) {
    ScheduleStage stage = make_stage(type, 2000, 200);
    const Schedule schedule = make_schedule({stage}, 1e-3, 4);
    for (int64_t step = 0; step < 2000; ++step) {
      EXPECT_LT(std::abs(schedule.lr(step + 1) - schedule.lr(step)), 1e-3 / 199)
          << name_of(type) << step;
    }
  }
}

TEST(Schedule, StagesSwitchAtTheirFirstStep) {
  ScheduleStage first = make_stage(ScheduleKind::kConstant, 0);
  first.length = in_tokens(10 * kTokens + 1);  // rounded up to 11 steps
  const Schedule schedule = make_schedule(
      {first, make_stage(ScheduleKind::kLinear, 5), make_stage(ScheduleKind::kConstant, 1)});
  EXPECT_EQ(schedule.stages(), 3);
  EXPECT_EQ(schedule.stage_begin(0), 0);
  EXPECT_EQ(schedule.stage_begin(1), 11);
  EXPECT_EQ(schedule.stage_begin(2), 16);
  EXPECT_EQ(schedule.stage_begin(3), 17);
  EXPECT_EQ(schedule.total_steps(), 17);
  EXPECT_EQ(schedule.stage(0), 0);
  EXPECT_EQ(schedule.stage(10), 0);
  EXPECT_EQ(schedule.stage(11), 1);
  EXPECT_EQ(schedule.stage(15), 1);
  EXPECT_EQ(schedule.stage(16), 2);
  EXPECT_EQ(schedule.stage(1000), 2);
  EXPECT_DOUBLE_EQ(schedule.lr(11), 1.0);
  EXPECT_DOUBLE_EQ(schedule.lr(15), 0.2);
  EXPECT_DOUBLE_EQ(schedule.lr(16), 1.0);
}

TEST(Schedule, WarmupMayFillAWholeStage) {
  const Schedule schedule = make_schedule({make_stage(ScheduleKind::kCosine, 10, 10)});
  EXPECT_DOUBLE_EQ(schedule.lr(9), 1.0);
  EXPECT_DOUBLE_EQ(schedule.lr(10), 1.0);
}

TEST(Schedule, PreviewListsThePointsWhereTheCurveChanges) {
  ScheduleStage power = make_stage(ScheduleKind::kPower, 1000, 50);
  ScheduleStage exponential = make_stage(ScheduleKind::kExponential, 200);
  const Schedule schedule = make_schedule({power, exponential}, 0.0165, 4);
  const std::vector<SchedulePoint> points = schedule.preview();
  std::vector<std::string> names;
  for (const SchedulePoint& point : points) {
    names.push_back(point.what);
    EXPECT_EQ(point.lr, schedule.lr(point.step));
    EXPECT_EQ(point.tokens, point.step * kTokens);
    EXPECT_EQ(point.stage, schedule.stage(point.step));
  }
  EXPECT_EQ(names, (std::vector<std::string>{"start", "warmup done", "half", "cap released",
                                             "last step", "start", "half", "last step"}));
  const int64_t release = points[3].step;
  EXPECT_EQ(schedule.lr(release - 1), 0.0165);
  EXPECT_LT(schedule.lr(release), 0.0165);
  EXPECT_EQ(points.back().step, 1199);
}

TEST(Schedule, PreviewOfOneStepIsOneLine) {
  EXPECT_EQ(make_schedule({make_stage(ScheduleKind::kCosine, 1)}).preview().size(), 1U);
}

TEST(Schedule, ErrorsNameTheStageAndTheKey) {
  EXPECT_NE(config_error({}).find("stages is empty"), std::string::npos);
  EXPECT_NE(
      config_error({make_stage(ScheduleKind::kConstant, 0)}).find("stage 'constant': length is 0"),
      std::string::npos);
  EXPECT_NE(
      config_error({make_stage(ScheduleKind::kLinear, 5, 6)}).find("schedule.warmup of 6 steps"),
      std::string::npos);
  ScheduleStage wsd = make_stage(ScheduleKind::kWsd, 10, 6);
  wsd.schedule.decay_fraction = 0.5;
  EXPECT_NE(config_error({wsd}).find("overlap"), std::string::npos);
  EXPECT_NE(config_error(
                {make_stage(ScheduleKind::kLinear, 5), make_stage(ScheduleKind::kExponential, 5)})
                .find("let that stage end above 0"),
            std::string::npos);
  ScheduleStage nan = make_stage(ScheduleKind::kCosine, 5);
  nan.schedule.final_ratio = std::nan("");
  EXPECT_NE(config_error({nan}).find("final_ratio"), std::string::npos);
}

}  // namespace
}  // namespace sbtrain
