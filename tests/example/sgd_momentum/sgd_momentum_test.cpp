// An optimizer from outside the library, through its public interface alone. Registered, it is
// known to the configuration and its reference of keys, its state is planned, sharded, saved and
// resharded, and a run can change to it.
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "core/error.h"
#include "optim/adamw.h"
#include "support/optimizer_runs.h"
#include "support/process.h"
#include "train/plan.h"
#include "train/verify.h"

namespace sbtrain {

void register_sgd_momentum(OptimizerRegistry& registry);

namespace test {
namespace {

const Config& sgd() {
  static const Config config = optimizer_config("optimizer: sgd_momentum, momentum: 0.8");
  return config;
}

TEST(SgdMomentum, IsConfiguredByItsName) {
  EXPECT_EQ(sgd().train.optimizer.type, "sgd_momentum");
  EXPECT_EQ(flatten(sgd()).at("train.momentum"), "0.8");
  EXPECT_EQ(parse_config(config_yaml(sgd()), "printed"), sgd());
  EXPECT_NE(field_help("train.optimizer").find("sgd_momentum"), std::string::npos);
  EXPECT_NE(config_markdown().find("is repeated. Only with optimizer sgd_momentum."),
            std::string::npos);
}

TEST(SgdMomentum, RefusesOptionsOfOtherOptimizers) {
  try {
    optimizer_config("optimizer: sgd_momentum, beta1: 0.5");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kConfig);
    EXPECT_NE(std::string(error.what()).find("beta1: has a meaning only with optimizer adamw"),
              std::string::npos)
        << error.what();
  }
}

// One f32 for each parameter, where AdamW keeps two.
TEST(SgdMomentum, TheDryRunPlansItsState) {
  const auto state = [](const Config& config) {
    return plan_memory(config, Backend::kCpu)
        .persistent[static_cast<size_t>(MemoryClass::kOptimizer)];
  };
  EXPECT_EQ(2 * state(sgd()), state(optimizer_config("")));
  EXPECT_NE(describe_run(sgd(), Backend::kCpu, {}).find("sgd_momentum"), std::string::npos);
}

TEST(SgdMomentum, LearnsAndRepeatsOnShards) {
  const OptimizerResult one = run_optimizer(sgd(), {.last = 20});
  EXPECT_LT(one.losses.back(), one.losses.front());
  for (const OptimizerRun& run :
       {OptimizerRun{.world = 2},
        OptimizerRun{.sharding = Sharding::kHybrid, .world = 4, .node_size = 2},
        OptimizerRun{.sharding = Sharding::kNone, .world = 2},
        OptimizerRun{.sharding = Sharding::kGrad, .world = 4}}) {
    OptimizerRun shards = run;
    shards.last = 20;
    const OptimizerResult many = run_optimizer(sgd(), shards);
    for (size_t i = 0; i < one.losses.size(); ++i) {
      EXPECT_NEAR(many.losses[i], one.losses[i], 1e-5 * one.losses[i]) << i;
    }
    EXPECT_EQ(run_optimizer(sgd(), shards).tensors, many.tensors);
  }
}

// 1 -> 2 -> 1 ranks: every bit of weights and state comes back, and the run goes on as if nothing
// had happened.
TEST(SgdMomentum, ReshardsWithEveryBit) {
  const TemporaryFolder one, two, back;
  const OptimizerResult straight = run_optimizer(sgd(), {.last = 6});
  const OptimizerResult saved = run_optimizer(sgd(), {.last = 3, .to = one.path()});
  const OptimizerResult on_two = run_optimizer(
      sgd(), {.world = 2, .first = 3, .last = 3, .from = one.path(), .to = two.path()});
  EXPECT_EQ(on_two.tensors, saved.tensors);
  const OptimizerResult again =
      run_optimizer(sgd(), {.first = 3, .last = 3, .from = two.path(), .to = back.path()});
  EXPECT_EQ(again.tensors, saved.tensors);
  const OptimizerResult rest = run_optimizer(sgd(), {.first = 3, .last = 6, .from = back.path()});
  EXPECT_EQ(rest.tensors, straight.tensors);
  EXPECT_EQ(rest.losses, std::vector<double>(straight.losses.begin() + 3, straight.losses.end()));
  const CheckpointReader reader(back.path() / "checkpoints/step-00000003");
  EXPECT_EQ(reader.kinds(), (std::vector<std::string>{"model", "sgd_momentum"}));
}

TEST(SgdMomentum, GoesOnWithTheWeightsOfAnother) {
  const TemporaryFolder folder;
  const OptimizerResult saved =
      run_optimizer(optimizer_config(""), {.last = 3, .to = folder.path()});
  EXPECT_THROW(run_optimizer(sgd(), {.first = 3, .last = 3, .from = folder.path()}), Error);
  const OptimizerResult changed = run_optimizer(
      sgd(), {.first = 3, .last = 3, .from = folder.path(), .state = StateFrom::kAnotherOptimizer});
  for (const auto& [name, values] : changed.tensors) {
    if (name.starts_with(kModelKind)) {
      EXPECT_EQ(values, saved.tensors.at(name)) << name;
    } else {
      EXPECT_EQ(values, std::vector<float>(values.size(), 0.0f)) << name;
    }
  }
}

}  // namespace
}  // namespace test
}  // namespace sbtrain

int main(int argc, char** argv) {
  sbtrain::register_optimizer(sbtrain::register_sgd_momentum);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
