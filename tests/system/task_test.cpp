// Whole runs on synthetic tasks, and sweeps of them.
#include <fmt/format.h>

#include <csignal>
#include <cstring>

#include "runs.h"

namespace sbtrain {
namespace {

namespace fs = std::filesystem;
using test::loss_at;
using test::Process;
using test::read_file;
using test::write_file;

// A folder with the configuration of a small MQAR task that is learned in seconds.
class TaskRun : public test::SystemTest {
 protected:
  void SetUp() override {
    write_file(path("config.yaml"), R"(
name: recall
seed: 1
device: cpu
model:
  layers: 2
  width: 32
  heads: 1
  vocab: 64
  norm: layernorm
  mlp: none
  position: learned
  max_positions: 32
  attention: [{type: short_conv}, {type: softmax, position: none}]
train: {sequence_length: 32, micro_batch: 32, batch: 32, lr: 1e-2}
data: {task: {type: mqar, pairs: 4, examples: 4096, eval_examples: 250}}
stages: [{name: train, length: 20 epochs, schedule: {type: cosine, warmup: 20 steps}}]
validation: {every: 1 epoch, stop_accuracy: 0.95}
checkpoint: {every: 1 epoch}
metrics: {every: 32, tensorboard: false}
)");
    write_file(path("sweep.yaml"), R"(
name: pair
out: )" + path("sweep") + R"(
variants: [{name: recall, config: config.yaml}]
set: {stages.0.length: 200 steps, validation.every: 100 steps, metrics.every: 1}
grid: {train.lr: [1e-2, 1e-3]}
best_over: [train.lr]
)");
  }

  int evaluates(const std::string& out, const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"eval", "--checkpoint", path(out), "--device", "cpu"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(arguments);
  }

  nlohmann::json evaluate(const std::string& out, std::vector<std::string> more = {}) {
    more.emplace_back("--json");
    EXPECT_EQ(evaluates(out, more), 0) << output_;
    return nlohmann::json::parse(output_.substr(output_.find('{')));
  }

  nlohmann::json sweep_runs() const {
    return nlohmann::json::parse(read_file(path("sweep/sweep.json"))).at("runs");
  }
};

TEST_F(TaskRun, LearnsMqarAndStopsThere) {
  ASSERT_EQ(run(training("run")), 0) << output_;
  const std::vector<std::string> history = records("run");
  EXPECT_LT(loss_at(history, 0, "validation/accuracy"), 0.1);
  const int last = last_step("run");
  EXPECT_LT(last, 20 * 128);
  EXPECT_EQ(last % 128, 0);
  EXPECT_GE(loss_at(history, last, "validation/accuracy"), 0.95);
  EXPECT_NE(output_.find("accuracy"), std::string::npos) << output_;

  const nlohmann::json result = evaluate("run");
  EXPECT_EQ(result.at("labels"), 1000);
  EXPECT_EQ(result.at("step"), last);
  EXPECT_EQ(result.at("accuracy"), loss_at(history, last, "validation/accuracy"));
  EXPECT_NEAR(result.at("loss").get<double>(), loss_at(history, last, "validation/loss"), 1e-6);

  EXPECT_EQ(run(training("run")), 0);  // the stop is part of the checkpoint
  EXPECT_NE(output_.find("complete"), std::string::npos) << output_;
  EXPECT_EQ(records("run"), history);
}

// A model that has learned the task attends to the answers, and the measures of one example agree
// with its map. (With some seeds, not that of this run, it attends to the token behind an answer,
// to which the convolution has handed it on.)
TEST_F(TaskRun, LooksAtTheAnswers) {
  ASSERT_EQ(run(training("run")), 0) << output_;
  const nlohmann::json all = evaluate("run", {"--task-positions", "50"});
  EXPECT_EQ(all.at("task"), "mqar");
  EXPECT_EQ(all.at("examples"), 50);
  ASSERT_EQ(all.at("heads").size(), 1U);  // the convolution has no map
  const nlohmann::json& head = all.at("heads").at(0);
  EXPECT_EQ(head.at("layer"), 1);
  EXPECT_EQ(head.at("queries"), 200);
  EXPECT_GT(head.at("iou_top"), 0.7);
  EXPECT_GT(head.at("mass"), 0.5);

  ASSERT_EQ(evaluates("run", {"--attention-maps", path("maps"), "--task-example", "0"}), 0)
      << output_;
  const nlohmann::json maps = nlohmann::json::parse(read_file(path("maps/maps.json")));
  const auto positions = maps.at("positions").get<std::vector<std::pair<size_t, size_t>>>();
  ASSERT_EQ(positions.size(), 4U);
  const std::string bytes =
      read_file(path("maps/" + maps.at("maps").at(0).at("file").get<std::string>()));
  std::vector<float> weights(bytes.size() / sizeof(float));
  ASSERT_EQ(weights.size(), 32U * 32U);
  std::memcpy(weights.data(), bytes.data(), bytes.size());
  double mass = 0;
  for (const auto& [query, key] : positions) mass += double{weights[query * 32 + key]} / 4;
  const nlohmann::json one = evaluate("run", {"--task-positions", "1"});
  EXPECT_NEAR(one.at("heads").at(0).at("mass").get<double>(), mass, 1e-6);

  ASSERT_EQ(evaluates("run", {"--task-positions", "2"}), 0) << output_;
  EXPECT_NE(output_.find("IoU top"), std::string::npos) << output_;
  const std::vector<std::pair<std::vector<std::string>, std::string>> bad = {
      {{"--task-positions", "251"}, "--task-positions: the task has 250 held-out examples"},
      {{"--attention-maps", path("maps"), "--task-example", "250"}, "250 held-out examples"},
      {{"--task-example", "1"}, "--attention-maps"},
      {{"--tokens", "64"}, "--tokens: without --data all held-out examples"},
      {{"--recall"}, "--recall: without --data all held-out examples"},
      {{"--threshold", "0.3"}, "--threshold requires"}};
  for (const auto& [arguments, message] : bad) {
    EXPECT_EQ(evaluates("run", arguments), 2) << output_;
    EXPECT_NE(output_.find(message), std::string::npos) << output_;
  }
}

TEST_F(TaskRun, InterruptedRunsContinueExactly) {
  const std::vector<std::string> few = {"--stages.0.length=3 epochs", "--metrics.every=1"};
  ASSERT_EQ(run(training("whole", few)), 0) << output_;
  for (const int step : {50, 200, 300}) {
    EXPECT_EQ(run_and_signal("parts", step, {SIGTERM}, few), 85) << output_;
  }
  ASSERT_EQ(run(training("parts", few)), 0) << output_;
  expect_equal_runs("whole", "parts");
}

TEST_F(TaskRun, MicroBatchesChangeNothingButRounding) {
  const std::vector<std::string> few = {"--stages.0.length=20 steps"};
  ASSERT_EQ(run(training("whole", few)), 0) << output_;
  ASSERT_EQ(run(training("parts", {few[0], "--train.micro_batch=4"})), 0) << output_;
  for (const char* key : {"train/loss", "train/grad_norm"}) {
    EXPECT_NEAR(loss_at(records("whole"), 1, key), loss_at(records("parts"), 1, key), 1e-5);
  }
  EXPECT_NEAR(loss_at(records("whole"), 20, "validation/loss"),
              loss_at(records("parts"), 20, "validation/loss"), 1e-3);
}

TEST_F(TaskRun, AnotherTaskCannotContinueTheRun) {
  ASSERT_EQ(run(training("run", {"--stages.0.length=20 steps"})), 0) << output_;
  EXPECT_EQ(run(training("run", {"--data.task.pairs=5"})), 3);
  EXPECT_NE(output_.find("data.task.pairs: 4 in the checkpoint, 5 now"), std::string::npos)
      << output_;
}

TEST_F(TaskRun, SweepsContinueWhereTheyWereInterrupted) {
  {
    Process process(command({"sweep", path("sweep.yaml")}), folder_ / "log", environment_);
    while (process.running() && last_step("sweep/recall/lr=1e-3") < 20) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    process.signal(SIGTERM);
    ASSERT_EQ(process.wait(), 85) << process.output();
  }
  EXPECT_EQ(sweep_runs().at(0).at("status"), "done");
  EXPECT_EQ(sweep_runs().at(1).at("status"), "interrupted");
  const int stopped = last_step("sweep/recall/lr=1e-3");
  const auto first = fs::last_write_time(path("sweep/recall/lr=1e-2/metrics.jsonl"));

  ASSERT_EQ(run({"sweep", path("sweep.yaml"), "--all"}), 0) << output_;
  EXPECT_NE(output_.find("resumed from"), std::string::npos) << output_;
  EXPECT_EQ(fs::last_write_time(path("sweep/recall/lr=1e-2/metrics.jsonl")), first);
  EXPECT_LT(stopped, 200);
  const nlohmann::json runs = sweep_runs();
  for (const nlohmann::json& result : runs) {
    EXPECT_EQ(result.at("status"), "done");
    EXPECT_EQ(result.at("step"), 200);
    EXPECT_EQ(result.at("epochs"), 200.0 * 32 / 4096);
    EXPECT_NE(output_.find(fmt::format("{:.4f}", result.at("best_accuracy").get<double>())),
              std::string::npos)
        << output_;
  }
  const bool first_is_best = runs[0].at("best_accuracy") >= runs[1].at("best_accuracy");
  EXPECT_EQ(runs[0].at("best"), first_is_best);
  EXPECT_EQ(runs[1].at("best"), !first_is_best);

  // The result equals that of a run trained without a sweep.
  ASSERT_EQ(run(training("alone", {"--stages.0.length=200 steps", "--validation.every=100 steps",
                                   "--metrics.every=1", "--train.lr=1e-3"})),
            0)
      << output_;
  EXPECT_EQ(records("alone"), records("sweep/recall/lr=1e-3"));
}

TEST_F(TaskRun, SweepsTrainSeveralRunsAtATime) {
  const std::vector<std::string> sweep = {"sweep", path("sweep.yaml"), "--jobs", "2", "--all"};
  const std::vector<std::string> runs = {"sweep/recall/lr=1e-2", "sweep/recall/lr=1e-3"};
  {
    Process process(command(sweep), folder_ / "log", environment_);
    while (process.running() &&
           std::ranges::any_of(runs, [&](const std::string& run) { return last_step(run) < 10; })) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    process.signal(SIGTERM);
    ASSERT_EQ(process.wait(), 85) << process.output();
  }
  for (size_t i = 0; i < runs.size(); ++i) {
    EXPECT_EQ(sweep_runs().at(i).at("status"), "interrupted");
    EXPECT_LT(last_step(runs[i]), 200);
  }
  ASSERT_EQ(run(sweep), 0) << output_;
  for (size_t i = 0; i < runs.size(); ++i) {
    EXPECT_EQ(sweep_runs().at(i).at("status"), "done");
    EXPECT_EQ(last_step(runs[i]), 200);
    EXPECT_NE(read_file(path(runs[i]) + "/output.log").find("resumed from"), std::string::npos);
  }
}

// The runs of a sweep that is killed save, and do not train on unseen.
TEST_F(TaskRun, RunsOfAKilledSweepSaveAndEnd) {
  const std::vector<std::string> runs = {"sweep/recall/lr=1e-2", "sweep/recall/lr=1e-3"};
  Process process(command({"sweep", path("sweep.yaml"), "--jobs", "2",
                           "--set=stages.0.length=100000 steps", "--set=validation.every=0"}),
                  folder_ / "log", environment_);
  while (process.running() &&
         std::ranges::any_of(runs, [&](const std::string& run) { return last_step(run) < 10; })) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  process.signal(SIGKILL);
  EXPECT_EQ(process.wait(), 128 + SIGKILL);
  const auto saved = [&](const std::string& run) {
    return read_file(path(run) + "/output.log").find("saved; the same command continues") !=
           std::string::npos;
  };
  for (int i = 0; i < 3000 && !std::ranges::all_of(runs, saved); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_TRUE(std::ranges::all_of(runs, saved));
}

TEST_F(TaskRun, ABadRunOfASweepDoesNotEndIt) {
  write_file(path("sweep.yaml"), R"(
name: pair
out: )" + path("sweep") + R"(
variants:
  - {name: bad, config: config.yaml, set: {model.heads: 5}}
  - {name: diverging, config: config.yaml, set: {train.lr: 1e30, train.max_bad_steps: 2, train.clip: 0}}
  - {name: good, config: config.yaml}
set: {stages.0.length: 20 steps}
)");
  EXPECT_EQ(run({"sweep", path("sweep.yaml")}), 3) << output_;  // the code of the first failure
  EXPECT_EQ(sweep_runs().at(0).at("exit_code"), 3);
  EXPECT_EQ(sweep_runs().at(1).at("exit_code"), 6) << output_;
  EXPECT_EQ(sweep_runs().at(1).at("status"), "failed");
  EXPECT_EQ(sweep_runs().at(2).at("status"), "done");
  EXPECT_NE(output_.find("width 32 is not divisible by 5 heads"), std::string::npos) << output_;
}

}  // namespace
}  // namespace sbtrain
