// Whole runs of the program on the GPU: they agree with the CPU within rounding, and give equal
// bits when they are repeated or continued.
#include <fmt/format.h>

#include <cmath>
#include <csignal>
#include <cstdio>

#include "checkpoint/checkpoint.h"
#include "core/device.h"
#include "core/gpus.h"
#include "optim/adamw.h"
#include "runs.h"

namespace sbtrain {
namespace {

namespace fs = std::filesystem;
using test::loss_at;
using test::read_file;
using test::write_file;

// Bounds of the difference, in nats, between runs in bf16 on the GPU and in fp32 on the CPU.
constexpr double kStepDifference = 0.05;
constexpr double kMeanDifference = 0.01;

class GpuSystemTest : public test::SystemTest {
 protected:
  // The object that the last command printed on a line of its own, in front of what its log tells.
  nlohmann::json printed_json() const {
    const size_t begin = output_.find('{');
    return nlohmann::json::parse(output_.substr(begin, output_.find('\n', begin) - begin));
  }
  void SetUp() override {
    std::string why;
    if (!cuda_available(&why)) GTEST_SKIP() << "no GPU: " << why;
    environment_["XDG_CACHE_HOME"] = path("cache");  // holds the choices of matrix products
    SystemTest::SetUp();
  }

  // 20 steps in two stages with checkpoints at 10 and 20.
  std::vector<std::string> twenty_steps(const std::string& out, const std::string& device) const {
    return training(out, {"--device=" + device, "--stages.0.length=12 steps",
                          "--stages.1.length=8 steps", "--checkpoint.keep=5"});
  }

  // Training losses of steps [first, last] of two runs: every difference and their mean are small.
  void expect_close_losses(const std::string& a, const std::string& b, int first, int last) const {
    const std::vector<std::string> of_a = records(a);
    const std::vector<std::string> of_b = records(b);
    double largest = 0;
    double sum = 0;
    double absolute = 0;
    for (int step = first; step <= last; ++step) {
      const double d = loss_at(of_a, step, "train/loss") - loss_at(of_b, step, "train/loss");
      EXPECT_LE(std::abs(d), kStepDifference) << "step " << step;
      largest = std::max(largest, std::abs(d));
      sum += d;
      absolute += std::abs(d);
    }
    const int count = last - first + 1;
    EXPECT_LE(std::abs(sum / count), kMeanDifference);
    std::printf("%s - %s, steps %d to %d: largest %.1e, mean %+.1e, mean of absolutes %.1e nats\n",
                a.c_str(), b.c_str(), first, last, largest, sum / count, absolute / count);
  }
};

std::vector<float> values(const CheckpointReader& checkpoint, const std::string& moment) {
  int64_t count = 1;
  for (const int64_t size : checkpoint.shape(kAdamM, moment)) count *= size;
  std::vector<float> values(static_cast<size_t>(count));
  checkpoint.read(kAdamM, moment, 0, count, values.data());
  return values;
}

// The norm of a - b over that of b.
double relative_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0;
  double norm = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    difference += std::pow(double{a[i]} - double{b[i]}, 2);
    norm += std::pow(double{b[i]}, 2);
  }
  return std::sqrt(difference / norm);
}

TEST_F(GpuSystemTest, LossCurvesAgreeWithTheCpu) {
  for (const std::string attention :
       {"stickbreaking, remainder: bias, head_norm: true", "softmax"}) {
    write_file(path("config.yaml"), R"(
name: curve
seed: 3
model:
  layers: 3
  width: 64
  inner: 172   # stored padded
  heads: 4
  vocab: 400
  init_std: 0.08
  attention: {type: )" + attention + R"(}
train: {sequence_length: 128, micro_batch: 2, batch: 4, lr: 2e-3}
data:
  sources: [{path: )" + path("a.h5") + R"(}]
  validation: [)" + path("b.h5") + R"(]
  tokenizer: )" + path("tokenizer.model") +
                                        R"(
stages: [{name: train, length: 200 steps, schedule: {type: cosine, warmup: 20 steps}}]
validation: {every: 100 steps, tokens: 4096}
checkpoint: {every: 0 steps}
metrics: {every: 1}
)");
    const std::string name = attention.substr(0, attention.find(','));
    const std::string cpu = name + "-cpu";
    const std::string cuda = name + "-cuda";
    ASSERT_EQ(run(training(cpu, {"--device=cpu"})), 0) << output_;
    ASSERT_EQ(run(training(cuda, {"--device=cuda"})), 0) << output_;
    expect_close_losses(cuda, cpu, 1, 200);
    for (const int step : {0, 100, 200}) {
      const double on_cuda = loss_at(records(cuda), step, "validation/loss");
      EXPECT_NEAR(on_cuda, loss_at(records(cpu), step, "validation/loss"), kStepDifference);
    }
    EXPECT_LT(loss_at(records(cuda), 200, "validation/loss"),
              0.8 * loss_at(records(cuda), 0, "validation/loss"));

    ASSERT_EQ(run({"eval", "--checkpoint", path(cuda), "--data", path("b.h5"), "--tokens", "4096",
                   "--json", "--device", "cuda"}),
              0)
        << output_;
    EXPECT_NEAR(printed_json().at("loss").get<double>(),
                loss_at(records(cuda), 200, "validation/loss"), 2e-3);
    const auto longer = [&](const std::vector<std::string>& how, const char* device) {
      std::vector<std::string> arguments = {"eval",     "--checkpoint", path(cuda), "--json",
                                            "--device", device,         "--data",   path("a.h5")};
      arguments.insert(arguments.end(), how.begin(), how.end());
      EXPECT_EQ(run(arguments), 0) << output_;
      const auto json = printed_json();
      return (json.contains("lengths") ? json.at("lengths").at(0) : json).at("loss").get<double>();
    };
    for (const std::vector<std::string>& how : std::vector<std::vector<std::string>>{
             {"--lengths", "300"}, {"--window", "100", "--stride", "30", "--tokens", "3000"}}) {
      EXPECT_NEAR(longer(how, "cuda"), longer(how, "cpu"), 5e-3) << how.front();
    }
    ASSERT_EQ(run({"generate", "--checkpoint", path(cuda), "--prompt", "The", "--max-tokens", "20",
                   "--device", "cuda"}),
              0)
        << output_;
    EXPECT_NE(output_.find("The"), std::string::npos) << output_;
  }
}

TEST_F(GpuSystemTest, RepeatedRunsAreEqual) {
  ASSERT_EQ(run(twenty_steps("a", "cuda")), 0) << output_;
  ASSERT_EQ(run(twenty_steps("b", "cuda")), 0) << output_;
  expect_equal_runs("a", "b");
  EXPECT_EQ(read_file(path("a") + "/gemm.txt"), read_file(path("b") + "/gemm.txt"));
  EXPECT_FALSE(read_file(path("a") + "/gemm.txt").empty());
}

// As on another GPU of the same type: other algorithms may be the fastest there.
TEST_F(GpuSystemTest, RunsThatTimeTheirProductsAnewAreEqual) {
  ASSERT_EQ(run(twenty_steps("a", "cuda")), 0) << output_;
  for (const std::string again : {"b", "c"}) {
    environment_["XDG_CACHE_HOME"] = path("cache of " + again);
    ASSERT_EQ(run(twenty_steps(again, "cuda")), 0) << output_;
    expect_equal_runs("a", again);
  }
}

TEST_F(GpuSystemTest, RecomputingChangesNothing) {
  ASSERT_EQ(run(twenty_steps("a", "cuda")), 0) << output_;
  std::vector<std::string> full = twenty_steps("b", "cuda");
  full.push_back("--train.recompute=full");
  ASSERT_EQ(run(full), 0) << output_;
  expect_equal_runs("a", "b");
}

// The ranges of an update are cut where rates differ, at any element.
TEST_F(GpuSystemTest, MatricesWithARateOfTheirOwnTrainAsOnTheCpu) {
  for (const std::string optimizer : {"adamw", "muon"}) {
    for (const std::string device : {"cpu", "cuda"}) {
      std::vector<std::string> steps =
          twenty_steps(fmt::format("{}-{}", optimizer, device), device);
      steps.insert(steps.end(), {"--train.optimizer=" + optimizer, "--model.matrix_lr_factor=0.25",
                                 "--model.embedding_init_std=0.1"});
      ASSERT_EQ(run(steps), 0) << output_;
    }
    expect_close_losses(optimizer + "-cuda", optimizer + "-cpu", 1, 20);
  }
}

TEST_F(GpuSystemTest, OffloadingChangesNothing) {
  ASSERT_EQ(run(twenty_steps("a", "cuda")), 0) << output_;
  std::vector<std::string> offload = twenty_steps("b", "cuda");
  offload.insert(offload.end(), {"--train.recompute=full", "--train.offload=activations"});
  ASSERT_EQ(run(offload), 0) << output_;
  expect_equal_runs("a", "b");
}

// The choices of matrix products must come from the run's folder, since the cache is removed.
TEST_F(GpuSystemTest, AContinuedRunEqualsAnUninterruptedOne) {
  ASSERT_EQ(run(twenty_steps("whole", "cuda")), 0) << output_;
  copy_run("whole", "parts", 10);
  fs::remove_all(path("cache"));
  ASSERT_EQ(run(twenty_steps("parts", "cuda")), 0) << output_;
  EXPECT_NE(output_.find("resumed from"), std::string::npos) << output_;
  expect_equal_runs("whole", "parts");
}

TEST_F(GpuSystemTest, ASignalSavesAndTheRunContinues) {
  const std::vector<std::string> options = {"--device=cuda", "--stages.0.length=600 steps",
                                            "--validation.every=300 steps"};
  ASSERT_EQ(run(training("whole", options)), 0) << output_;
  EXPECT_EQ(run_and_signal("parts", 10, {SIGTERM}, options), 85) << output_;
  ASSERT_EQ(run(training("parts", options)), 0) << output_;
  expect_equal_runs("whole", "parts");
}

// Takes the optimizer.
class TwoGpus : public GpuSystemTest, public testing::WithParamInterface<const char*> {};

INSTANTIATE_TEST_SUITE_P(All, TwoGpus, testing::Values("adamw", "muon"),
                         [](const auto& test) { return std::string(test.param); });

// All modes that one machine has, both ways of moving weights and gradients, and runs that go on
// with another number of GPUs.
TEST_P(TwoGpus, TrainLikeOne) {
  if (visible_gpus() < 2) GTEST_SKIP() << "one GPU";
  const auto steps = [&](const std::string& out, int gpus, const char* mode = "full",
                         const char* engine = "multiprocessors") {
    std::vector<std::string> arguments = twenty_steps(out, "cuda");
    arguments.insert(arguments.end(), {"--train.batch=8", fmt::format("--train.gpus={}", gpus),
                                       fmt::format("--train.sharding={}", mode),
                                       fmt::format("--train.optimizer={}", GetParam()),
                                       fmt::format("--train.gather_engine={}", engine),
                                       fmt::format("--train.reduce_engine={}", engine)});
    return arguments;
  };
  ASSERT_EQ(run(steps("one", 1)), 0) << output_;
  for (const char* mode : {"full", "grad", "none"}) {
    ASSERT_EQ(run(steps(mode, 2, mode)), 0) << output_;
    expect_close_losses(mode, "one", 1, 20);
  }
  ASSERT_EQ(run(steps("engines", 2, "full", "copy_engines")), 0) << output_;
  expect_close_losses("engines", "one", 1, 20);
  ASSERT_EQ(run(steps("auto", 2, "full", "auto")), 0) << output_;
  expect_equal_runs(output_.find("auto is copy_engines") != std::string::npos ? "engines" : "full",
                    "auto");
  ASSERT_EQ(run(steps("again", 2)), 0) << output_;
  expect_equal_runs("full", "again");
  copy_run("full", "continued", 10);
  ASSERT_EQ(run(steps("continued", 2)), 0) << output_;
  expect_equal_runs("full", "continued");
  std::vector<std::pair<std::string, int>> moves = {{"one", 2}, {"full", 1}};
  if (visible_gpus() >= 4) {
    for (const char* mode : {"full", "none"}) {
      const std::string out = fmt::format("four-{}", mode);
      ASSERT_EQ(run(steps(out, 4, mode)), 0) << output_;
      expect_close_losses(out, "one", 1, 20);
    }
    ASSERT_EQ(run(steps("four-engines", 4, "full", "copy_engines")), 0) << output_;
    expect_close_losses("four-engines", "one", 1, 20);
    moves.insert(moves.end(), {{"one", 4}, {"four-full", 2}, {"four-full", 1}});
  }
  for (const auto& [from, gpus] : moves) {
    const std::string moved = fmt::format("{}-on-{}", from, gpus);
    copy_run(from, moved, 10);
    ASSERT_EQ(run(steps(moved, gpus)), 0) << output_;
    const std::string said = fmt::format("now there {} {}:", gpus == 1 ? "is" : "are", gpus);
    EXPECT_NE(output_.find(said), std::string::npos) << output_;
    expect_close_losses(moved, from, 1, 20);
  }
}

// As two or all of four, and as two pairs.
TEST_F(GpuSystemTest, GpusThatShareSequencesTrainLikeOne) {
  if (visible_gpus() < 2) GTEST_SKIP() << "one GPU";
  const auto steps = [&](const std::string& out, int gpus, int ranks, const char* layout) {
    std::vector<std::string> arguments = twenty_steps(out, "cuda");
    arguments.insert(arguments.end(), {"--train.sequence_length=512", "--train.batch=4",
                                       fmt::format("--train.gpus={}", gpus),
                                       fmt::format("--train.context_parallel={}", ranks),
                                       fmt::format("--train.context_layout={}", layout)});
    return arguments;
  };
  ASSERT_EQ(run(steps("one", 1, 1, "auto")), 0) << output_;
  for (const auto& [gpus, ranks] : {std::pair{2, 2}, {4, 4}, {4, 2}}) {
    if (gpus > visible_gpus()) continue;
    for (const char* layout : {"consecutive", "folded"}) {
      const std::string out = fmt::format("{}-of-{}-{}", ranks, gpus, layout);
      ASSERT_EQ(run(steps(out, gpus, ranks, layout)), 0) << output_;
      expect_close_losses(out, "one", 1, 20);
    }
  }
  ASSERT_EQ(run(steps("again", 2, 2, "folded")), 0) << output_;
  expect_equal_runs("2-of-2-folded", "again");
}

// More could not share the batch. The run says so and trains.
TEST_F(GpuSystemTest, ABatchForOneGpuLeavesTheOthers) {
  if (visible_gpus() < 2) GTEST_SKIP() << "one GPU";
  ASSERT_EQ(run(training("run", {"--device=cuda", "--train.batch=4", "--train.micro_batch=4",
                                 "--stages=[{length: 3 steps}]"})),
            0)
      << output_;
  const std::string said = fmt::format("training on 1 of {} GPUs", visible_gpus());
  EXPECT_NE(output_.find(said), std::string::npos) << output_;
}

// After the first step the first moments are the gradients of the whole batch, times one factor.
TEST_F(GpuSystemTest, TwoGpusHaveTheGradientsOfOne) {
  if (visible_gpus() < 2) GTEST_SKIP() << "one GPU";
  const auto one_step = [&](const std::string& out, int gpus, const char* mode) {
    return training(
        out, {"--device=cuda", "--train.batch=8", "--stages=[{length: 1 steps}]",
              fmt::format("--train.gpus={}", gpus), fmt::format("--train.sharding={}", mode)});
  };
  ASSERT_EQ(run(one_step("one", 1, "full")), 0) << output_;
  const CheckpointReader one(newest("one"));
  ASSERT_FALSE(one.names(kAdamM).empty());
  for (const char* mode : {"full", "grad", "none"}) {
    ASSERT_EQ(run(one_step(mode, 2, mode)), 0) << output_;
    const CheckpointReader two(newest(mode));
    ASSERT_EQ(two.names(kAdamM), one.names(kAdamM));
    for (const std::string& name : one.names(kAdamM)) {
      EXPECT_LT(relative_difference(values(two, name), values(one, name)), 1e-5)
          << mode << " " << name;
    }
  }
}

TEST_F(GpuSystemTest, CheckpointsMoveBetweenDevices) {
  for (const std::string from : {"cuda", "cpu"}) {
    const std::string to = from == "cuda" ? "cpu" : "cuda";
    const std::string moved = fmt::format("{}-then-{}", from, to);
    ASSERT_EQ(run(twenty_steps(from, from)), 0) << output_;
    copy_run(from, moved, 10);
    ASSERT_EQ(run(twenty_steps(moved, to)), 0) << output_;
    EXPECT_NE(output_.find("resumed from"), std::string::npos) << output_;
    expect_close_losses(moved, from, 1, 20);
  }
}

TEST_F(GpuSystemTest, BenchSkipCountsTheKeysThatAreRead) {
  ASSERT_EQ(run(training("run")), 0) << output_;
  const auto rows = [&](const std::string& device) {
    EXPECT_EQ(run({"bench", "skip", "--checkpoint", path("run"), "--device", device, "--lengths",
                   "512", "--epsilons", "0.9", "--tokens", "512", "--repeats", "1", "--json"}),
              0)
        << output_;
    std::vector<nlohmann::json> all;
    std::istringstream lines(output_);
    for (std::string line; std::getline(lines, line);) {
      if (line.starts_with('{')) all.push_back(nlohmann::json::parse(line));
    }
    return all;
  };
  const std::vector<nlohmann::json> cpu = rows("cpu");
  const std::vector<nlohmann::json> gpu = rows("cuda");
  ASSERT_EQ(cpu.size(), 2U);
  ASSERT_EQ(gpu.size(), 2U);
  EXPECT_EQ(gpu[0].at("keys_read"), 1.0);
  EXPECT_LT(gpu[1].at("keys_read"), 0.9);
  EXPECT_GT(gpu[1].at("keys_read"), 0.05);
  for (const size_t i : {size_t{0}, size_t{1}}) {
    EXPECT_NEAR(gpu[i].at("loss").get<double>(), cpu[i].at("loss").get<double>(), kMeanDifference);
  }
}

TEST_F(GpuSystemTest, AModelTooLargeForTheDeviceIsRefusedWithItsPlan) {
  EXPECT_EQ(run(training("run", {"--device=cuda", "--model.layers=64", "--model.width=16384",
                                 "--model.inner=65536", "--model.heads=128"})),
            8)
      << output_;
  for (const char* text : {"out of memory", "weights", "optimizer", "total", "train.micro_batch",
                           "train.sequence_length", "train.recompute"}) {
    EXPECT_NE(output_.find(text), std::string::npos) << text << " is not in:\n" << output_;
  }
  // Activations by themselves can also exceed the memory.
  EXPECT_EQ(run(training(
                "run", {"--device=cuda", "--train.micro_batch=4194304", "--train.batch=4194304"})),
            8)
      << output_;
}

}  // namespace
}  // namespace sbtrain
