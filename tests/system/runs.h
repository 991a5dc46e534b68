// Shared by the tests of whole runs of the program.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "support/program.h"

namespace sbtrain::test {

namespace fs = std::filesystem;

// A folder with a tokenizer, document stores and a configuration of a model that trains in about
// a second: two stages with different mixtures, validation, a checkpoint every 10 steps.
class SystemTest : public ProgramTest {
 protected:
  SystemTest() { environment_["OMP_NUM_THREADS"] = "2"; }

  void SetUp() override {
    // Distributes the documents of the test text over two sources.
    std::istringstream text(read_file(SBTRAIN_TEST_TEXT));
    std::map<std::string, std::string> texts;
    bool first = true;
    for (std::string line; std::getline(text, line); first = !first) {
      texts[first ? "a" : "b"] += line + "\n";
    }
    make_training_files(folder_.path(), texts);
    write_file(path("config.yaml"), R"(
name: system
seed: 3
device: cpu
model: {layers: 2, width: 32, inner: 44, heads: 2, vocab: 400}
train: {sequence_length: 32, micro_batch: 2, batch: 4, lr: 3e-3, max_bad_steps: 3}
data:
  sources: [{path: )" + path("a.h5") + R"(}]
  validation: [)" + path("b.h5") + R"(]
  tokenizer: )" + path("tokenizer.model") +
                                        R"(
stages:
  - {name: first, length: 35 steps, schedule: {type: power, warmup: 5 steps}}
  - name: second
    length: 25 steps
    schedule: {type: exponential}
    sources: [{path: )" + path("a.h5") +
                                        ", weight: 1}, {path: " + path("b.h5") + R"(, weight: 3}]
validation: {every: 20 steps, tokens: 512}
checkpoint: {every: 10 steps, keep: 2, max_failures: 2}
metrics: {every: 1}
)");
  }

  // The arguments of a training run in folder `out`.
  std::vector<std::string> training(const std::string& out,
                                    const std::vector<std::string>& more = {}) const {
    std::vector<std::string> arguments = {"--config", path("config.yaml"), "--out", path(out)};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }

  // Starts a run and sends `signals` once its metrics have reached `step`.
  int run_and_signal(const std::string& out, int step, const std::vector<int>& signals,
                     const std::vector<std::string>& more = {}) {
    Process process(command(training(out, more)), folder_ / "log", environment_);
    while (process.running() && last_step(out) < step) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    for (const int signal : signals) {
      process.signal(signal);
      std::this_thread::sleep_for(std::chrono::milliseconds(3));
    }
    const int code = process.wait();
    output_ = process.output();
    return code;
  }

  // Records of metrics.jsonl without the values that depend on time.
  std::vector<std::string> records(const std::string& out) const {
    std::istringstream lines(read_file(path(out) + "/metrics.jsonl"));
    std::vector<std::string> result;
    for (std::string line; std::getline(lines, line);) {
      nlohmann::json record = nlohmann::json::parse(line, nullptr, false);
      if (record.is_discarded()) continue;  // the line that is being written
      for (const char* key : {"time", "wall_time", "train/tokens_per_second", "train/mfu",
                              "train/exposed_communication"}) {
        record.erase(key);
      }
      result.push_back(record.dump());
    }
    return result;
  }

  int last_step(const std::string& out) const {
    return static_cast<int>(std::max<int64_t>(0, last_recorded_step(path(out))));
  }

  fs::path newest(const std::string& out) const {
    const fs::path checkpoints = path(out) + "/checkpoints";
    std::string name = read_file(checkpoints / "latest");
    name.erase(name.find_last_not_of('\n') + 1);
    return checkpoints / name;
  }

  // The weights and moments of the newest checkpoint: the files of all ranks, in their order.
  std::string weights(const std::string& out) const {
    std::vector<fs::path> files;
    for (const auto& entry : fs::directory_iterator(newest(out))) {
      if (entry.path().filename().string().starts_with("rank-")) files.push_back(entry.path());
    }
    EXPECT_FALSE(files.empty()) << newest(out);
    std::sort(files.begin(), files.end());
    std::string bytes;
    for (const fs::path& file : files) bytes += read_file(file);
    return bytes;
  }

  // Copies a run in the state in which its checkpoint of `step` was the newest.
  void copy_run(const std::string& from, const std::string& to, int step) const {
    fs::copy(path(from), path(to), fs::copy_options::recursive);
    const fs::path checkpoints = path(to) + "/checkpoints";
    const std::string name = fmt::format("step-{:08}", step);
    ASSERT_TRUE(fs::exists(checkpoints / name));
    for (const auto& entry : fs::directory_iterator(checkpoints)) {
      if (entry.is_directory() && entry.path().filename() > name) fs::remove_all(entry.path());
    }
    write_file(checkpoints / "latest", name + "\n");
  }

  // Checks that two runs have the same history and equal weights and moments, bit for bit.
  void expect_equal_runs(const std::string& a, const std::string& b) const {
    EXPECT_EQ(records(a), records(b));
    EXPECT_EQ(newest(a).filename(), newest(b).filename());
    EXPECT_TRUE(weights(a) == weights(b)) << "final weights differ";
    EXPECT_EQ(read_file(newest(a) / "state.json"), read_file(newest(b) / "state.json"));
  }
};

inline double loss_at(const std::vector<std::string>& records, int step, const char* key) {
  const std::string wanted = fmt::format("\"step\":{}", step);
  for (const std::string& text : records) {
    if (text.find(wanted) == std::string::npos) continue;  // parsing all of them takes seconds
    const nlohmann::json record = nlohmann::json::parse(text);
    if (record.at("step") == step && record.contains(key)) return record.at(key);
  }
  ADD_FAILURE() << "no " << key << " at step " << step;
  return 0;
}

}  // namespace sbtrain::test
