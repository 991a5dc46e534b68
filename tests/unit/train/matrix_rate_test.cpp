// Runs in which the matrices of blocks have a learning rate of their own (model.matrix_lr_factor),
// and initial weights that differ (model.embedding_init_std): what muP asks for.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "support/optimizer_runs.h"

namespace sbtrain::test {
namespace {

constexpr double kFactor = 0.25;

Config with_factor(const std::string& optimizer, double factor) {
  Config config = optimizer_config(fmt::format("optimizer: {}, weight_decay: 0.3", optimizer));
  config.model.matrix_lr_factor = factor;
  return config;
}

bool in_block(const std::string& name) {
  return name.find("proj.weight") != std::string::npos;
}

class MatrixRate : public testing::TestWithParam<OptimizerRun> {
 protected:
  static OptimizerRun run(int first, int last) {
    OptimizerRun run = GetParam().steps(first, last);
    run.one_sequence = true;
    return run;
  }
};

// A step is linear in its rate, weight decay included.
TEST_P(MatrixRate, MatricesOfBlocksTakeTheirShareOfAStep) {
  for (const char* optimizer : {"adamw", "muon"}) {
    const auto start = run_optimizer(with_factor(optimizer, 1), run(0, 0)).tensors;
    const auto whole = run_optimizer(with_factor(optimizer, 1), run(0, 1)).tensors;
    const auto part = run_optimizer(with_factor(optimizer, kFactor), run(0, 1)).tensors;
    int matrices = 0, others = 0;
    for (const auto& [name, w] : start) {
      const bool moment = !name.starts_with("model/");
      if (!moment) ++(in_block(name) ? matrices : others);
      if (moment || !in_block(name)) {
        EXPECT_EQ(part.at(name), whole.at(name)) << optimizer << " " << name;
        continue;
      }
      for (size_t i = 0; i < w.size(); ++i) {
        const double full = static_cast<double>(whole.at(name)[i]) - w[i];
        ASSERT_NEAR(static_cast<double>(part.at(name)[i]) - w[i], kFactor * full,
                    2e-7 * (1 + std::abs(w[i])))
            << optimizer << " " << name << " " << i;
      }
    }
    EXPECT_EQ(matrices, 3 * 7);    // q, k, v, o, gate, up and down of three layers
    EXPECT_EQ(others, 3 * 2 + 2);  // norms, the embedding and the last norm
  }
}

TEST_P(MatrixRate, TheSameGradientsGiveTheSameBits) {
  for (const char* optimizer : {"adamw", "muon"}) {
    Config config = with_factor(optimizer, kFactor);
    config.train.clip = 0;  // the norm is summed up by shards
    const OptimizerRun one{.last = 3, .one_sequence = true};
    EXPECT_EQ(run_optimizer(config, run(0, 3)).tensors, run_optimizer(config, one).tensors)
        << optimizer;
  }
}

TEST_P(MatrixRate, ResumesBitForBitByWayOfAnotherWorld) {
  for (const char* optimizer : {"adamw", "muon"}) {
    const Config config = with_factor(optimizer, kFactor);
    EXPECT_EQ(run_resumed(config, run(0, 2), 2, 4).tensors,
              run_optimizer(config, run(0, 4)).tensors)
        << optimizer;
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, MatrixRate,
                         testing::Values(OptimizerRun{}, OptimizerRun{.world = 2},
                                         OptimizerRun{.world = 8},
                                         OptimizerRun{.sharding = Sharding::kGrad, .world = 4},
                                         OptimizerRun{.sharding = Sharding::kNone, .world = 2}),
                         [](const auto& info) {
                           return fmt::format("{}{}", name_of(info.param.sharding),
                                              info.param.world);
                         });

double deviation(const std::vector<float>& values) {
  double squares = 0;
  for (const float value : values) squares += static_cast<double>(value) * value;
  return std::sqrt(squares / static_cast<double>(values.size()));
}

TEST(EmbeddingInit, HasAStandardDeviationOfItsOwn) {
  Config config = optimizer_config("");
  config.model.vocab = 4000;
  config.model.tied = false;
  config.model.position = PositionEmbedding::kLearned;
  config.model.max_positions = 1000;
  const auto as_matrices = run_optimizer(config, {}).tensors;
  config.model.embedding_init_std = 0.7;
  const auto own = run_optimizer(config, {}).tensors;
  int tables = 0;
  for (const auto& [name, w] : as_matrices) {
    if (name == "model/model.embed_tokens.weight" || name == "model/lm_head.weight" ||
        name == "model/model.embed_positions.weight") {
      ++tables;
      EXPECT_NEAR(deviation(w), 0.3, 0.3 * 0.03) << name;
      EXPECT_NEAR(deviation(own.at(name)), 0.7, 0.7 * 0.03) << name;
    } else {
      EXPECT_EQ(own.at(name), w) << name;
    }
  }
  EXPECT_EQ(tables, 3);
}

}  // namespace
}  // namespace sbtrain::test
