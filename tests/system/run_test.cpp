// Whole runs of the program: training, interruptions, faults and recovery from them.
#include <fmt/format.h>

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
  EXPECT_NE(output_.find("memory of the run: "), std::string::npos) << output_;
  const std::vector<std::string> history = records("run");
  EXPECT_LT(loss_at(history, 60, "validation/loss"), 0.9 * loss_at(history, 0, "validation/loss"));
  EXPECT_GT(loss_at(history, 60, "validation/bits_per_byte"), 0);
  EXPECT_EQ(newest("run").filename(), "step-00000060");
  EXPECT_NE(output_.find("step-00000060 ("), std::string::npos) << output_;  // with size and time
  EXPECT_TRUE(fs::exists(path("run") + "/config.yaml"));
  EXPECT_TRUE(fs::exists(path("run") + "/run.json"));
  const std::string status = read_file(path("run") + "/status.json");
  EXPECT_EQ(nlohmann::json::parse(status),
            (nlohmann::json{{"state", "complete"}, {"exit_code", 0}}));

  EXPECT_EQ(run(training("run")), 0);  // nothing left to do
  EXPECT_NE(output_.find("complete"), std::string::npos) << output_;

  ASSERT_EQ(run({"eval", "--checkpoint", path("run"), "--data", path("b.h5"), "--tokens", "512",
                 "--json", "--device", "cpu"}),
            0)
      << output_;
  EXPECT_NEAR(nlohmann::json::parse(output_.substr(output_.find('{'))).at("loss").get<double>(),
              loss_at(history, 60, "validation/loss"), 1e-5);
}

// A model that has learned a repeating text continues it exactly.
// Also those of steps that save, validate or stop, after which the host waits for the device.
TEST_F(SystemTest, EveryRecordHasTheRateOfItsSteps) {
  const auto rates = [&](const std::vector<std::string>& more) {
    std::vector<std::string> options = {
        "--model.width=64",          "--model.inner=176",         "--train.sequence_length=128",
        "--train.batch=8",           "--stages.1.length=1 steps", "--checkpoint.every=5 steps",
        "--validation.every=7 steps"};
    options.insert(options.end(), more.begin(), more.end());
    fs::remove_all(path("run"));
    EXPECT_EQ(run(training("run", options)), 0) << output_;
    std::vector<double> values;
    std::istringstream lines(read_file(path("run") + "/metrics.jsonl"));
    for (std::string line; std::getline(lines, line);) {
      const nlohmann::json record = nlohmann::json::parse(line);
      if (!record.contains("train/tokens_per_second")) continue;
      values.push_back(record.at("train/tokens_per_second"));
    }
    return values;
  };
  for (const char* every : {"--metrics.every=1", "--metrics.every=5"}) {
    std::vector<double> all = rates({every});
    ASSERT_GT(all.size(), 6U);
    std::ranges::sort(all);
    // Other work on the machine makes steps slower, but not faster.
    EXPECT_LT(all.back(), 20 * all[all.size() / 2]) << every;
  }
}

TEST_F(SystemTest, GenerateContinuesTheTrainedText) {
  const std::vector<std::string> days = {"Monday", "Tuesday",  "Wednesday", "Thursday",
                                         "Friday", "Saturday", "Sunday"};
  std::string week;
  for (int i = 0; i < 300; ++i) week += (i > 0 ? " " : "") + days[i % 7];
  write_file(path("week.txt"), week);
  ASSERT_EQ(run({"prepare", "--input", path("week.txt"), "--tokenizer", path("tokenizer.model"),
                 "--output", path("week.h5")}),
            0)
      << output_;
  write_file(path("week.yaml"),
             "include: config.yaml\nname: week\ndata: {sources: [{path: " + path("week.h5") +
                 "}], validation: []}\nvalidation: {every: 0}\n"
                 "train: {lr: 1e-2}\n"
                 "stages: [{name: week, length: 300 steps}]\n");
  ASSERT_EQ(run({"--config", path("week.yaml"), "--out", path("week")}), 0) << output_;
  ASSERT_EQ(run({"generate", "--checkpoint", path("week"), "--prompt", "Monday Tuesday Wednesday",
                 "--max-tokens", "24", "--temperature", "0", "--device", "cpu"}),
            0)
      << output_;
  EXPECT_EQ(output_.rfind("Monday Tuesday Wednesday Thursday Friday Saturday", 0), 0U) << output_;
}

TEST_F(SystemTest, ResultsDoNotDependOnTheNumberOfThreads) {
  for (const char* threads : {"1", "3"}) {
    environment_["OMP_NUM_THREADS"] = threads;
    ASSERT_EQ(run(training(threads)), 0) << output_;
  }
  EXPECT_EQ(records("1"), records("3"));
}

// Models of other layouts learn, save, evaluate and generate too.
TEST_F(SystemTest, OtherLayoutsTrain) {
  const std::map<std::string, std::string> models = {
      {"rebased",
       "{norm: layernorm, mlp: gelu, position: learned, max_positions: 64, heads: 5, attention: "
       "[{type: short_conv}, {type: rebased, feature_dim: 8}]}"},
      {"coca", "{attention: [{type: coca}, {type: softmax, position: fire, window: 16}]}"},
      {"gpt2",
       "{norm: layernorm, mlp: gelu_tanh, position: learned, max_positions: 64, attention: {type: "
       "softmax, position: none, qkv_bias: true, output_bias: true}}"},
      {"gpt_neox",
       "{norm: layernorm, mlp: gelu, parallel_residual: true, attention: {type: softmax, "
       "rope_fraction: 0.25, qkv_bias: true, output_bias: true}}"},
      {"olmo2",
       "{norm_position: output, attention: {type: softmax, qk_norm: true, qk_norm_scope: "
       "joint}}"}};
  for (const auto& [name, model] : models) {
    write_file(path(name + ".yaml"),
               fmt::format("include: config.yaml\nname: {}\nmodel: {}\n", name, model));
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
  // Beyond the trained length rotary positions can be stretched, but learned positions end.
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
  EXPECT_EQ(run({"generate", "--checkpoint", path("rebased"), "--max-tokens", "64"}), 2);
  EXPECT_NE(output_.find("--max-tokens: 64 of the model's 64 positions"), std::string::npos)
      << output_;
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

// Where activations are is no part of a checkpoint: a run may be continued with or without.
TEST_F(SystemTest, OffloadingChangesNothing) {
  const std::vector<std::string> offload = {"--train.recompute=full",
                                            "--train.offload=activations"};
  ASSERT_EQ(run(training("whole")), 0) << output_;
  ASSERT_EQ(run(training("offloaded", offload)), 0) << output_;
  expect_equal_runs("whole", "offloaded");
  EXPECT_EQ(run_and_signal("parts", 7, {SIGTERM}, offload), 85) << output_;
  ASSERT_EQ(run(training("parts")), 0) << output_;
  expect_equal_runs("whole", "parts");
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

// A run that is killed at random moments, in training and in saving, always continues from a good
// checkpoint and ends with the same results as an uninterrupted run.
TEST_F(SystemTest, SurvivesKillAtRandomMoments) {
  ASSERT_EQ(run(training("whole")), 0) << output_;
  const std::vector<std::string> often = {"--checkpoint.every=2 steps"};
  std::mt19937 random(1);
  const char* wanted = std::getenv("TEST_KILLS");  // more kills, for a long run by hand
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

// Another optimizer only where that is allowed, with a message; an average of the weights at any
// time. `ckpt ls` says which checkpoint keeps what.
TEST_F(SystemTest, AnotherOptimizerIsAllowedAndAnAverageIsKept) {
  ASSERT_EQ(run_and_signal("run", 12, {SIGTERM}), 85) << output_;
  EXPECT_EQ(run(training("run", {"--train.optimizer=muon"})), 3);
  EXPECT_NE(output_.find("train.optimizer: adamw in the checkpoint, muon now"), std::string::npos)
      << output_;
  const std::vector<std::string> muon = {"--train.optimizer=muon", "--train.ema=0.9",
                                         "--checkpoint.allow_changes=[train.optimizer]"};
  ASSERT_EQ(run(training("run", muon)), 0) << output_;
  EXPECT_NE(output_.find("was saved with the optimizer adamw, and the run goes on with muon: where "
                         "it has no muon_m, that begins with zeros"),
            std::string::npos)
      << output_;
  EXPECT_NE(output_.find("has no average of the weights (train.ema): it begins with them"),
            std::string::npos)
      << output_;

  const auto evaluated = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"eval", "--checkpoint", path("run"), "--device",
                                          "cpu",  "--tokens",     "512",       "--json"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    EXPECT_EQ(run(arguments), 0) << output_;
    return nlohmann::json::parse(output_.substr(output_.find('{')));
  };
  const nlohmann::json of_weights = evaluated({}), of_average = evaluated({"--ema"});
  EXPECT_NE(of_average.at("loss"), of_weights.at("loss"));
  EXPECT_FALSE(of_weights.contains("ema"));
  EXPECT_EQ(of_average.at("ema"), true);
  const auto exported = [&](const std::string& run_folder, const std::string& to,
                            const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"export", "--checkpoint", path(run_folder), "--output",
                                          path(to)};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(arguments);
  };
  ASSERT_EQ(exported("run", "weights", {}), 0) << output_;
  ASSERT_EQ(exported("run", "average", {"--ema"}), 0) << output_;
  EXPECT_NE(read_file(path("weights/model.safetensors")),
            read_file(path("average/model.safetensors")));
  // The run has validated the weights alone.
  const std::string card = read_file(path("average/README.md"));
  EXPECT_NE(read_file(path("weights/README.md")).find("| validation loss | "), std::string::npos);
  EXPECT_EQ(card.find("| validation loss | "), std::string::npos) << card;
  EXPECT_NE(card.find("| weights | a running average of the run's, of decay 0.9 |"),
            std::string::npos)
      << card;

  // Its newest checkpoint has no average any more. It is whole, so the older one, which has an
  // average, is not exported in its place.
  copy_run("run", "dropped", 50);
  ASSERT_EQ(run(training("dropped", {"--train.optimizer=muon"})), 0) << output_;
  EXPECT_EQ(run({"ckpt", "ls", path("dropped")}), 0) << output_;
  EXPECT_NE(output_.find("muon      ok        adam_m, adam_v, muon_m\n"), std::string::npos)
      << output_;
  EXPECT_NE(output_.find("muon      ok        adam_m, adam_v, ema, muon_m\n"), std::string::npos)
      << output_;
  EXPECT_EQ(exported("dropped", "none", {"--ema"}), 3) << output_;
  EXPECT_NE(output_.find("step-00000060: it has no average of the weights"), std::string::npos)
      << output_;
  EXPECT_FALSE(fs::exists(path("none")));
}

// Neither the records after the step that it would have gone back to nor the run's configuration
// and tokenizer are lost, and the order to go back stays to be obeyed.
TEST_F(SystemTest, AStartThatItsDataRefusesChangesNoFileOfTheRun) {
  ASSERT_EQ(run_and_signal("run", 12, {SIGTERM}), 85) << output_;
  const auto files = [&] {
    std::map<std::string, std::string> contents;
    for (const auto& entry : fs::directory_iterator(path("run"))) {
      if (entry.is_regular_file()) contents[entry.path().filename()] = read_file(entry.path());
    }
    return contents;
  };
  const std::map<std::string, std::string> before = files();
  EXPECT_EQ(run(training("run", {"--checkpoint.resume=10", "--data.sources.0.weight=2"})), 3);
  EXPECT_NE(output_.find("data.sources.0.weight: 1 in the checkpoint, 2 now"), std::string::npos)
      << output_;
  EXPECT_EQ(files(), before);

  std::string bytes = read_file(path("a.h5"));
  bytes[bytes.size() - 99] ^= 1;
  write_file(path("a.h5"), bytes);
  EXPECT_EQ(run(training("run", {"--checkpoint.resume=none"})), 4) << output_;
  EXPECT_EQ(files(), before);
}

TEST_F(SystemTest, ASecondJobOnTheFolderIsRefused) {
  Process first(command(training("run", {"--stages.0.length=100000 steps"})), folder_ / "first",
                environment_);
  while (first.running() && last_step("run") < 2) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  EXPECT_EQ(run(training("run")), 2) << output_;
  const auto state = [&] {
    return nlohmann::json::parse(read_file(path("run") + "/status.json")).at("state");
  };
  EXPECT_EQ(state(), "running");  // the second start has not touched it
  first.signal(SIGTERM);
  EXPECT_EQ(first.wait(), 85) << first.output();
  EXPECT_EQ(state(), "stopped");
}

TEST_F(SystemTest, DivergenceEndsTheRunWithoutTouchingWeights) {
  EXPECT_EQ(run(training("run", {"--train.lr=1e30", "--stages.0.schedule.type=constant"})), 6)
      << output_;
  const auto status = nlohmann::json::parse(read_file(path("run") + "/status.json"));
  EXPECT_EQ(status.at("state"), "failed");
  EXPECT_EQ(status.at("exit_code"), 6);
  EXPECT_NE(output_.find(status.at("message").get<std::string>()), std::string::npos) << status;
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
  EXPECT_NE(output_.find("attention         stickbreaking"), std::string::npos) << output_;
  EXPECT_NE(output_.find("missing           nowhere.h5"), std::string::npos) << output_;
  EXPECT_NE(output_.find("duration          not known"), std::string::npos) << output_;
  EXPECT_FALSE(fs::exists(path("run")));
  EXPECT_EQ(run(training("run", {"--dry-run", "--peak-tflops=0.5"})), 0) << output_;
  EXPECT_NE(output_.find("of 0.5 TFLOP/s"), std::string::npos) << output_;
}

}  // namespace
}  // namespace sbtrain
