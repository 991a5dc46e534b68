// Whole runs of the program: training, interruptions, faults and what comes after them.
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <random>
#include <thread>

#include "runs.h"

namespace sbtrain {
namespace {

namespace fs = std::filesystem;
using test::loss_at;
using test::Process;
using test::read_file;
using test::SystemTest;
using test::write_file;

TEST_F(SystemTest, TrainsValidatesAndSaves) {
  ASSERT_EQ(run(training("run")), 0) << output_;
  const std::vector<std::string> history = records("run");
  EXPECT_LT(loss_at(history, 60, "validation/loss"), 0.9 * loss_at(history, 0, "validation/loss"));
  EXPECT_GT(loss_at(history, 60, "validation/bits_per_byte"), 0);
  EXPECT_EQ(newest("run").filename(), "step-00000060");
  EXPECT_TRUE(fs::exists(path("run") + "/config.yaml"));
  EXPECT_TRUE(fs::exists(path("run") + "/run.json"));

  EXPECT_EQ(run(training("run")), 0);  // nothing left to do
  EXPECT_NE(output_.find("complete"), std::string::npos) << output_;

  ASSERT_EQ(run({"eval", "--checkpoint", path("run"), "--data", path("b.h5"), "--tokens", "512",
                 "--json", "--device", "cpu"}),
            0)
      << output_;
  EXPECT_NEAR(nlohmann::json::parse(output_.substr(output_.find('{'))).at("loss").get<double>(),
              loss_at(history, 60, "validation/loss"), 1e-5);

  ASSERT_EQ(run({"generate", "--checkpoint", path("run"), "--prompt", "The", "--max-tokens", "20",
                 "--device", "cpu"}),
            0)
      << output_;
  EXPECT_EQ(output_.rfind("The", 0), 0U);
}

// Models of other layouts learn, save, evaluate and generate too.
TEST_F(SystemTest, OtherLayoutsTrain) {
  const std::map<std::string, std::string> models = {
      {"rebased",
       "{norm: layernorm, mlp: gelu, position: learned, max_positions: 64, heads: 5, attention: "
       "[{type: short_conv}, {type: rebased, feature_dim: 8}]}"},
      {"coca", "{attention: [{type: coca}, {type: softmax, position: fire, window: 16}]}"}};
  for (const auto& [name, model] : models) {
    write_file(path(name + ".yaml"),
               "include: config.yaml\nname: " + name + "\nmodel: " + model + "\n");
    ASSERT_EQ(run({"--config", path(name + ".yaml"), "--out", path(name)}), 0) << output_;
    const std::vector<std::string> history = records(name);
    EXPECT_LT(loss_at(history, 60, "validation/loss"),
              0.9 * loss_at(history, 0, "validation/loss"));
    ASSERT_EQ(run({"generate", "--checkpoint", path(name), "--device", "cpu", "--prompt", "The",
                   "--max-tokens", "9"}),
              0)
        << output_;
    EXPECT_EQ(output_.rfind("The", 0), 0U);
  }
  // Longer than trained: rotary positions can be stretched, learned ones end.
  const auto evaluate = [&](const std::string& name, const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"eval", "--checkpoint", path(name), "--sequence-length",
                                          "128",  "--json"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(arguments);
  };
  const auto loss = [&](const std::vector<std::string>& more) {
    EXPECT_EQ(evaluate("coca", more), 0) << output_;
    return nlohmann::json::parse(output_.substr(output_.find('{'))).at("loss").get<double>();
  };
  EXPECT_NE(loss({}), loss({"--rope-scaling", "dynamic_ntk"}));
  EXPECT_EQ(loss({}), loss({"--rope-scaling", "dynamic_ntk", "--rope-train-length", "128"}));
  EXPECT_EQ(evaluate("rebased", {}), 3);
  EXPECT_NE(output_.find("64 learned positions"), std::string::npos) << output_;
  EXPECT_EQ(evaluate("rebased", {"--rope-scaling", "linear"}), 2);
  EXPECT_NE(output_.find("no rotary positions"), std::string::npos) << output_;
}

TEST_F(SystemTest, RepeatedRunsAreEqual) {
  ASSERT_EQ(run(training("a")), 0) << output_;
  ASSERT_EQ(run(training("b")), 0) << output_;
  expect_equal_runs("a", "b");
}

TEST_F(SystemTest, RecomputingChangesNothing) {
  ASSERT_EQ(run(training("a")), 0) << output_;
  ASSERT_EQ(run(training("b", {"--train.recompute=full"})), 0) << output_;
  expect_equal_runs("a", "b");
}

TEST_F(SystemTest, SignalsSaveAndTheRunContinues) {
  ASSERT_EQ(run(training("whole")), 0) << output_;
  int step = 7;
  for (const std::vector<int>& signals :
       std::vector<std::vector<int>>{{SIGTERM}, {SIGUSR1}, {SIGINT}, {SIGTERM, SIGTERM, SIGUSR1}}) {
    EXPECT_EQ(run_and_signal("parts", step, signals), 85) << output_;
    step = last_step("parts") + 6;  // in the second stage at the end
  }
  EXPECT_EQ(run_and_signal("parts", step, {SIGUSR2}), 0) << output_;
  expect_equal_runs("whole", "parts");
}

TEST_F(SystemTest, SavesOnRequestAndGoesOn) {
  EXPECT_EQ(
      run_and_signal("run", 3, {SIGUSR2}, {"--checkpoint.every=0 steps", "--checkpoint.keep=5"}), 0)
      << output_;
  int folders = 0;
  for (const auto& entry : fs::directory_iterator(path("run") + "/checkpoints")) {
    folders += entry.is_directory();
  }
  EXPECT_EQ(folders, 2);  // the request's and the last one
}

// Killed at random moments, in training and in saving, a run always continues from a good
// checkpoint and ends as if nothing had happened.
TEST_F(SystemTest, SurvivesKillAtRandomMoments) {
  ASSERT_EQ(run(training("whole")), 0) << output_;
  const std::vector<std::string> often = {"--checkpoint.every=2 steps"};
  std::mt19937 random(1);
  const char* wanted = std::getenv("TEST_KILLS");  // more of them, for a long run by hand
  const int enough = wanted ? std::atoi(wanted) : 20;
  int kills = 0;
  for (int attempt = 0; kills < enough && attempt < 10 * enough; ++attempt) {
    // Each round starts where the last one was killed; a finished run starts over.
    Process process(command(training("killed", often)), folder_ / "log", environment_);
    const auto delay = std::uniform_int_distribution<int>(5, 600)(random);
    std::this_thread::sleep_for(std::chrono::milliseconds(delay));
    process.signal(SIGKILL);
    const int code = process.wait();
    if (code == 0) {
      expect_equal_runs("whole", "killed");
      fs::remove_all(path("killed"));
    } else {
      ASSERT_EQ(code, 128 + SIGKILL) << process.output();
      ++kills;
    }
  }
  EXPECT_EQ(kills, enough);
  ASSERT_EQ(run(training("killed", often)), 0) << output_;
  expect_equal_runs("whole", "killed");
}

TEST_F(SystemTest, DamagedCheckpointsAreRefusedAndOlderOnesTaken) {
  ASSERT_EQ(run(training("whole")), 0) << output_;
  ASSERT_EQ(run_and_signal("run", 33, {SIGTERM}), 85) << output_;
  const fs::path shard = newest("run") / "rank-00000-of-00001.safetensors";
  std::string bytes = read_file(shard);
  bytes[bytes.size() / 2] ^= 1;
  write_file(shard, bytes);
  ASSERT_EQ(run(training("run")), 0) << output_;
  EXPECT_NE(output_.find(shard.filename().string()), std::string::npos) << output_;
  expect_equal_runs("whole", "run");

  for (const auto& entry : fs::recursive_directory_iterator(path("run") + "/checkpoints")) {
    if (entry.path().filename() == "manifest.json") fs::resize_file(entry.path(), 10);
  }
  EXPECT_EQ(run(training("run")), 5) << output_;
}

TEST_F(SystemTest, AnotherModelCannotContinueTheRun) {
  ASSERT_EQ(run_and_signal("run", 12, {SIGTERM}), 85) << output_;
  EXPECT_EQ(run(training("run", {"--seed=4", "--model.norm_eps=1e-6"})), 3);
  EXPECT_NE(output_.find("seed: 3 in the checkpoint, 4 now"), std::string::npos) << output_;
  EXPECT_NE(output_.find("model.norm_eps"), std::string::npos) << output_;
  EXPECT_EQ(run(training("run",
                         {"--model.norm_eps=1e-6", "--checkpoint.allow_changes=[model.norm_eps]"})),
            0)
      << output_;
}

TEST_F(SystemTest, ASecondJobOnTheFolderIsRefused) {
  Process first(command(training("run", {"--stages.0.length=100000 steps"})), folder_ / "first",
                environment_);
  while (first.running() && last_step("run") < 2) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  EXPECT_EQ(run(training("run")), 2) << output_;
  first.signal(SIGTERM);
  EXPECT_EQ(first.wait(), 85) << first.output();
}

TEST_F(SystemTest, DivergenceEndsTheRunWithoutTouchingWeights) {
  EXPECT_EQ(run(training("run", {"--train.lr=1e30", "--stages.0.schedule.type=constant"})), 6)
      << output_;
}

TEST_F(SystemTest, DamagedDataIsRefused) {
  std::string bytes = read_file(path("a.h5"));
  bytes[bytes.size() / 2] ^= 4;
  write_file(path("a.h5"), bytes);
  EXPECT_EQ(run(training("run")), 4) << output_;
  EXPECT_NE(output_.find("a.h5"), std::string::npos) << output_;
  fs::resize_file(path("a.h5"), bytes.size() - 1);
  EXPECT_EQ(run(training("run")), 4) << output_;
}

TEST_F(SystemTest, FailedSavesEndTheRunOnlyWhenTheyRepeat) {
  // Files may grow to 40 blocks of 512 bytes: enough for metrics, not for a checkpoint.
  std::string shell = "ulimit -f 40; exec";
  for (const std::string& word : command(training("run"))) shell += " '" + word + "'";
  Process process({"bash", "-c", shell}, folder_ / "log", environment_);
  EXPECT_EQ(process.wait(), 9) << process.output();
  EXPECT_GE(last_step("run"), 20);  // the first failure did not end it
  for (const auto& entry : fs::directory_iterator(path("run") + "/checkpoints")) {
    ADD_FAILURE() << "left behind: " << entry.path();
  }
}

TEST_F(SystemTest, DryRunNeedsNoData) {
  EXPECT_EQ(run(training("run", {"--dry-run", "--data.sources=[{path: nowhere.h5}]"})), 0)
      << output_;
  EXPECT_NE(output_.find("parameters"), std::string::npos);
  EXPECT_FALSE(fs::exists(path("run")));
}

}  // namespace
}  // namespace sbtrain
