// Every state that a power failure may leave of a run's files: whatever the program has said to be
// saved is there, and metrics.jsonl has the records of every step before it.
#include <sstream>

#include "checkpoint/checkpoint.h"
#include "runs.h"
#include "support/file_history.h"

namespace sbtrain::test {
namespace {

constexpr const char* kRun = "new/runs/run";  // none of these folders is there before

class PowerLoss : public SystemTest {
 protected:
  void SetUp() override {
    SystemTest::SetUp();
    fs::create_directory(root());
    setenv("TMPDIR", "/dev/shm", 1);  // there are hundreds of states
    write_file(path("config.yaml"), fmt::format(R"(
seed: 3
device: cpu
model: {{layers: 1, width: 8, inner: 12, heads: 2, vocab: 400}}
train: {{sequence_length: 32, micro_batch: 2, batch: 2}}
data: {{sources: [{{path: {0}/a.h5}}], validation: [{0}/b.h5], tokenizer: {0}/tokenizer.model}}
stages: [{{length: 4 steps, schedule: {{type: constant, warmup: 0 steps}}}}]
validation: {{every: 2 steps, tokens: 64}}
checkpoint: {{every: 2 steps, keep: 2}}
metrics: {{every: 1, tensorboard: true}}
)",
                                                folder_.path().string()));
    environment_["LD_PRELOAD"] = SBTRAIN_FILE_RECORDER;
    environment_[kRootVariable] = root().string();
    environment_[kHistoryVariable] = path("history");
    const char* options = std::getenv("ASAN_OPTIONS");
    environment_["ASAN_OPTIONS"] =
        std::string(options == nullptr ? "" : options) + ":verify_asan_link_order=0";
  }

  fs::path root() const { return folder_ / "recorded"; }

  // Trains until there are `steps` steps, with the recorder.
  void train(int steps) {
    ASSERT_EQ(run({"--config", path("config.yaml"), "--out", (root() / kRun).string(),
                   fmt::format("--stages.0.length={} steps", steps)}),
              0)
        << output_;
  }

  // The lines of metrics.jsonl up to a step, as the program has written them.
  std::string records_up_to(int64_t step) const {
    std::istringstream lines(read_file(root() / kRun / "metrics.jsonl"));
    std::string text;
    for (std::string line; std::getline(lines, line);) {
      if (nlohmann::json::parse(line).at("step") <= step) text += line + "\n";
    }
    return text;
  }

  // `said`: the last step that the program has called saved; -1: none.
  void check(const fs::path& state, int64_t said) const {
    const fs::path run = state / kRun;
    std::vector<std::string> refused;
    const std::optional<CheckpointReader> newest = open_newest(run, &refused);
    EXPECT_TRUE(refused.empty()) << refused[0];
    if (said >= 0) {
      ASSERT_TRUE(newest) << "all of the run is lost after step " << said << " was saved";
    }
    if (!newest) return;
    const int64_t step = newest->manifest().step;
    EXPECT_GE(step, said);
    const std::string wanted = records_up_to(step);
    const std::string have = read_file(run / "metrics.jsonl");
    EXPECT_TRUE(have.starts_with(wanted)) << "at step " << step << " metrics.jsonl is\n" << have;
  }
};

TEST_F(PowerLoss, EveryStateOfARun) {
  train(4);
  train(8);  // continues
  if (HasFatalFailure()) return;
  const std::vector<RecordedOperation> history = read_history(path("history"));
  ASSERT_GT(history.size(), 100U);
  RecordedFiles files(root());
  const std::string checkpoints = std::string(kRun) + "/checkpoints";
  int64_t said = -1;
  bool named = false;  // `latest` has been replaced, and that is not flushed yet
  for (size_t n = 0; n < history.size(); ++n) {
    const RecordedOperation& operation = history[n];
    files.apply(operation);
    if (operation.second == checkpoints + "/latest") named = true;
    if (named && operation.operation == FileOperation::kFlush &&
        files.is(checkpoints, operation.inode)) {
      said = std::stoll(files.content(checkpoints + "/latest").substr(5));
      named = false;
    }
    for (const Survival survival : {Survival::kAll, Survival::kNames, Survival::kNothing}) {
      const TemporaryFolder state;
      files.write(state / "files", survival);
      check(state / "files", said);
      if (!HasFailure()) continue;
      FAIL() << "after operation " << n << " of " << history.size() << ", survival "
             << static_cast<int>(survival);
    }
  }
  EXPECT_EQ(said, 8);
  // The recorder has missed nothing.
  const TemporaryFolder end;
  files.write(end / "files", Survival::kAll);
  for (const auto& entry : fs::recursive_directory_iterator(root())) {
    const fs::path same = end / "files" / fs::relative(entry.path(), root());
    ASSERT_TRUE(fs::exists(same)) << same;
    if (!entry.is_regular_file()) continue;
    EXPECT_TRUE(read_file(entry.path()) == read_file(same)) << same;
  }
}

}  // namespace
}  // namespace sbtrain::test
