// Sweeps: the runs that a file expands to, the choice of the best, and the saved results.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "cli/child_runs.h"
#include "cli/sweep_file.h"
#include "config/schema.h"
#include "core/error.h"
#include "support/process.h"

namespace sbtrain::sweep_test {
namespace {

namespace fs = std::filesystem;
using test::TemporaryFolder;
using test::write_file;

constexpr const char* kSweep = R"(
name: trial
variants:
  - {name: one, config: ../a.yaml}
  - {config: b.yaml, set: {train.clip: 0.5}}
set: {seed: 2}
grid:
  data.task.pairs: [8, 16]
  train.lr: [1e-3, 1e-2]
best_over: [train.lr]
)";

SweepFile sweep_of(const TemporaryFolder& folder, const std::string& text) {
  write_file(folder / "sweep.yaml", text);
  return read_sweep(folder / "sweep.yaml");
}

std::string problem_of(const std::string& text) {
  const TemporaryFolder folder;
  try {
    sweep_of(folder, text);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kConfig);
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Sweep, IsTheProductOfVariantsAndGrid) {
  const TemporaryFolder folder;
  const SweepFile sweep = sweep_of(folder, kSweep);
  EXPECT_EQ(sweep.folder(), "runs/trial");
  const std::vector<SweepRun> runs = expand(sweep);
  ASSERT_EQ(runs.size(), 8u);
  std::vector<std::string> names;
  for (const SweepRun& run : runs) names.push_back(run.name);
  EXPECT_EQ(names, (std::vector<std::string>{"one/pairs=8,lr=1e-3", "one/pairs=8,lr=1e-2",
                                             "one/pairs=16,lr=1e-3", "one/pairs=16,lr=1e-2",
                                             "b/pairs=8,lr=1e-3", "b/pairs=8,lr=1e-2",
                                             "b/pairs=16,lr=1e-3", "b/pairs=16,lr=1e-2"}));
  EXPECT_EQ(runs[0].config, folder.path().parent_path() / "a.yaml");  // beside the sweep's folder
  EXPECT_EQ(runs[5].set, (Changes{{"seed", "2"}, {"train.clip", "0.5"}}));
  EXPECT_EQ(runs[5].grid, (Changes{{"data.task.pairs", "8"}, {"train.lr", "1e-2"}}));
}

TEST(Sweep, KeysOfOneEndingAreNamedInFull) {
  const TemporaryFolder folder;
  const std::vector<SweepRun> runs = expand(sweep_of(folder, R"(
name: trial
variants: [{config: a.yaml}]
grid: {model.attention.0.type: [softmax], model.attention.1.type: [based, rebased]}
)"));
  EXPECT_EQ(runs.at(1).name, "a/model.attention.0.type=softmax,model.attention.1.type=rebased");
}

TEST(Sweep, ProblemsAreNamedWithTheirPlace) {
  const std::string head = "name: trial\nvariants: [{config: a.yaml}]\n";
  EXPECT_EQ(problem_of(head), "");
  EXPECT_TRUE(contains(problem_of("variants: [{config: a.yaml}]\n"), "missing key 'name'"));
  EXPECT_TRUE(contains(problem_of("name: trial\n"), "missing key 'variants'"));
  EXPECT_TRUE(contains(problem_of("name: trial\nvariants: [{name: a}]\n"), "needs a `config`"));
  EXPECT_TRUE(contains(problem_of(head + "grit: {train.lr: [1]}\n"), "did you mean 'grid'?"));
  const std::string unknown = problem_of(head + "grid: {train.lrr: [1]}\n");
  EXPECT_TRUE(contains(unknown, "sweep.yaml:3:8")) << unknown;
  EXPECT_TRUE(contains(unknown, "did you mean 'train.lr'?")) << unknown;
  EXPECT_TRUE(contains(problem_of(head + "grid: {train.lr: 1}\n"), "expected a list"));
  EXPECT_TRUE(contains(problem_of(head + "grid: {train.lr: [1, 1]}\n"), "in the list already"));
  EXPECT_TRUE(contains(problem_of(head + "best_over: [train.lr]\n"), "is not in the grid"));
  EXPECT_TRUE(contains(problem_of("name: t\nvariants: [{config: a.yaml}, {config: a.yaml}]\n"),
                       "two variants are named 'a'"));
  EXPECT_TRUE(contains(problem_of(""), "sweep.yaml: missing key 'name'")) << problem_of("");
  EXPECT_TRUE(contains(problem_of(head + "grid: {data.tokenizer: [a/b, a_b]}\n"),
                       "two runs would have the folder 'a/tokenizer=a_b'"));
  EXPECT_THROW(read_sweep("nowhere.yaml"), Error);
}

TEST(Sweep, TheBestIsByAccuracyThenByLoss) {
  const TemporaryFolder folder;
  const SweepFile sweep = sweep_of(folder, kSweep);
  std::vector<SweepRun> runs = expand(sweep);
  runs[0].best_accuracy = 0.5;
  runs[0].best_loss = 0.1;
  runs[1].best_accuracy = 0.75;
  runs[1].best_loss = 0.9;
  runs[2].best_loss = 0.9;  // without accuracy, the loss decides
  runs[3].best_loss = 0.7;
  runs[5].best_loss = 3.0;  // the other has no result
  const std::vector<const SweepRun*> best = best_runs(sweep, runs);
  EXPECT_EQ(best, (std::vector<const SweepRun*>{&runs[1], &runs[3], &runs[5], &runs[6]}));
}

// The losses are those before a run diverged.
TEST(Sweep, ARunThatFailedIsNotTheBest) {
  const TemporaryFolder folder;
  SweepFile sweep = sweep_of(folder, kSweep);
  sweep.out = folder / "out";
  std::vector<SweepRun> runs = expand(sweep);
  for (SweepRun& run : runs) run.status = "done";
  const auto fail_with = [](SweepRun& run, double loss) {
    run.status = "failed";
    run.exit_code = 6;
    run.best_loss = loss;
  };
  runs[0].best_loss = 2.0;
  fail_with(runs[1], 1.0);
  fail_with(runs[2], 1.0);
  runs[3].best_loss = 2.0;
  fail_with(runs[4], 1.0);  // both have failed
  fail_with(runs[5], 0.5);
  EXPECT_EQ(best_runs(sweep, runs),
            (std::vector<const SweepRun*>{&runs[0], &runs[3], &runs[4], &runs[6]}));
  write_results(sweep, runs);
  const auto saved = nlohmann::json::parse(test::read_file(folder / "out/sweep.json"));
  std::vector<bool> best;
  for (const auto& run : saved.at("runs")) best.push_back(run.at("best"));
  const std::vector<bool> expected = {true, false, false, true, false, false};
  EXPECT_EQ(std::vector<bool>(best.begin(), best.begin() + 6), expected);
}

TEST(Sweep, ResultsComeFromTheMetricsAndSurvive) {
  const TemporaryFolder folder;
  SweepFile sweep = sweep_of(folder, kSweep);
  sweep.out = folder / "out";
  write_file(folder / "metrics.jsonl",
             "{\"step\":0,\"validation/loss\":9.0,\"validation/accuracy\":0.0}\n"
             "{\"step\":5,\"train/loss\":1.0}\n"
             "{\"step\":10,\"validation/loss\":0.5,\"validation/accuracy\":0.875}\n"
             "{\"step\":20,\"validation/loss\":null,\"validation/accuracy\":0.25}\n"
             "{\"step\":30,\"validat");
  std::vector<SweepRun> runs = expand(sweep);
  read_result(folder / "metrics.jsonl", runs[1]);
  EXPECT_EQ(runs[1].step, 20);
  EXPECT_EQ(runs[1].best_accuracy, 0.875);
  EXPECT_EQ(runs[1].best_loss, 0.5);
  read_result(folder / "nowhere", runs[2]);
  EXPECT_FALSE(runs[2].best_loss);
  runs[1].status = "done";
  runs[1].config_hash = "abc";
  runs[1].seconds = 12.5;
  runs[2].status = "failed";
  runs[2].exit_code = 6;
  write_results(sweep, runs);

  std::vector<SweepRun> again = expand(sweep);
  restore_results(sweep, again);
  EXPECT_EQ(again[1].status, "done");
  EXPECT_EQ(again[1].config_hash, "abc");
  EXPECT_EQ(again[1].seconds, 12.5);
  EXPECT_EQ(again[1].best_accuracy, 0.875);
  EXPECT_EQ(again[2].exit_code, 6);
  EXPECT_EQ(again[3].status, "waiting");
  const auto saved = nlohmann::json::parse(test::read_file(folder / "out/sweep.json"));
  EXPECT_EQ(saved.at("runs").at(1).at("best"), true);
  EXPECT_EQ(saved.at("runs").at(0).at("best"), false);
  EXPECT_EQ(saved.at("runs").at(1).at("grid").at("train.lr"), "1e-2");

  const std::string csv = test::read_file(folder / "out/sweep.csv");
  EXPECT_TRUE(contains(csv, "\n\"one/pairs=8,lr=1e-2\",one,8,1e-2,done,0,0.875,0.5,,20,12.5\n"))
      << csv;
  const std::string table = results_table(sweep, best_runs(sweep, again));
  EXPECT_TRUE(contains(table, "0.8750")) << table;
  EXPECT_TRUE(contains(table, "failed (6)")) << table;

  write_file(folder / "out/sweep.json", "{");
  EXPECT_THROW(restore_results(sweep, again), Error);
}

std::vector<std::string> gpus_of(const std::vector<ChildSlot>& slots) {
  std::vector<std::string> gpus;
  for (const ChildSlot& slot : slots) gpus.push_back(slot.gpus);
  return gpus;
}

TEST(Slots, ShareGpusEvenly) {
  using Gpus = std::vector<std::string>;
  EXPECT_EQ(gpus_of(make_slots(0, 3, "", 8)), (Gpus{"0", "1", "2"}));
  EXPECT_EQ(gpus_of(make_slots(2, 4, "", 8)), (Gpus{"0,1", "2,3"}));
  EXPECT_EQ(gpus_of(make_slots(2, 3, "", 8)), (Gpus{"0", "1"}));
  EXPECT_EQ(gpus_of(make_slots(0, 2, "5,GPU-8a", 8)), (Gpus{"5", "GPU-8a"}));
  EXPECT_EQ(gpus_of(make_slots(1, 4, "4,5,6,7", 8)), (Gpus{""}));
  EXPECT_EQ(gpus_of(make_slots(0, 1, "", 8)), (Gpus{""}));
  EXPECT_EQ(gpus_of(make_slots(3, 2, "", 8)), (Gpus{"0", "1", "0"}));
  EXPECT_EQ(gpus_of(make_slots(2, 1, "7", 8)), (Gpus{"7", "7"}));
}

TEST(Slots, ShareProcessors) {
  EXPECT_EQ(make_slots(0, 0, "", 8).size(), 1U);
  EXPECT_EQ(make_slots(0, 0, "", 8)[0].threads, 0);
  ASSERT_EQ(make_slots(3, 0, "", 8).size(), 3U);
  EXPECT_EQ(make_slots(3, 0, "", 8)[2].threads, 2);
  EXPECT_EQ(make_slots(3, 0, "", 2)[2].threads, 1);
  EXPECT_EQ(make_slots(3, 0, "", 8)[2].gpus, "");
  EXPECT_EQ(make_slots(4, 2, "", 8)[3].threads, 2);
  EXPECT_EQ(make_slots(2, 4, "", 8)[0].threads, 2);  // for each of the two ranks of a slot
}

TEST(Sweep, ShippedSweepsNameRunsThatLoad) {
  int count = 0;
  const fs::path sweeps = fs::path(SBTRAIN_SOURCE) / "configs/sweeps";
  for (const fs::directory_entry& entry : fs::directory_iterator(sweeps)) {
    const SweepFile sweep = read_sweep(entry.path());
    EXPECT_EQ(sweep.name, entry.path().stem());
    for (const SweepRun& run : expand(sweep)) {
      std::vector<Override> overrides;
      for (const auto& [key, value] : run.set) overrides.push_back({key, value, "set"});
      for (const auto& [key, value] : run.grid) overrides.push_back({key, value, "grid"});
      EXPECT_NO_THROW(load_config(run.config, overrides)) << run.name;
      ++count;
    }
  }
  EXPECT_EQ(count, 2 * 6 * 4 + 2 * 4 * 2 + 2 * 2 * (3 + 1) + 7 * 6 + 3 * 3 * 4 + 3 * 3 +
                       5 * 3 * 4 * 4 + 5 + 2 * 3 + 8 * 5 + 8 * 4 * 4 + 8 * 4 * 2 + 2 * 7 + 6 * 4 +
                       4 * 5);
}

}  // namespace
}  // namespace sbtrain::sweep_test
