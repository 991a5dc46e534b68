#include "train/metrics.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/error.h"
#include "support/process.h"

namespace sbtrain::test {
namespace {

namespace fs = std::filesystem;

MetricsOptions make_options(const std::string& folder) {
  MetricsOptions options;
  options.run_dir = folder;
  options.config.every = 10;
  options.config.progress = false;
  options.total_steps = 25;
  options.tokens_per_step = 100;
  return options;
}

std::vector<nlohmann::json> read_records(const TemporaryFolder& folder) {
  std::vector<nlohmann::json> records;
  std::istringstream in(read_file(folder / "metrics.jsonl"));
  for (std::string line; std::getline(in, line);) records.push_back(nlohmann::json::parse(line));
  return records;
}

void train(Metrics& metrics, int64_t first, int64_t last) {
  for (int64_t step = first; step <= last; ++step) {
    metrics.train_step({.step = step,
                        .loss = 8.0 / static_cast<double>(step),
                        .lr = 1e-3,
                        .grad_norm = 0.5,
                        .skipped_steps = 2,
                        .stage = 1});
  }
}

TEST(Metrics, RecordsTheFirstTheLastAndEveryTenthStep) {
  const TemporaryFolder folder;
  {
    Metrics metrics(make_options(folder.path()));
    train(metrics, 1, 25);
  }
  std::vector<int64_t> steps;
  for (const auto& record : read_records(folder)) {
    const int64_t step = record["step"];
    steps.push_back(step);
    EXPECT_EQ(record["tokens"], step * 100);
    EXPECT_EQ(record["train/loss"], 8.0 / static_cast<double>(step));
    EXPECT_EQ(record["train/lr"], 1e-3);
    EXPECT_EQ(record["train/grad_norm"], 0.5);
    EXPECT_EQ(record["train/skipped_steps"], 2);
    EXPECT_EQ(record["train/stage"], 1);
    EXPECT_GT(record["train/tokens_per_second"], 0.0);
    EXPECT_FALSE(record.contains("train/mfu"));  // the peak is unknown
  }
  EXPECT_EQ(steps, (std::vector<int64_t>{1, 10, 20, 25}));
}

// Of steps that take half a second and are noted late and together.
TEST(Metrics, RatesAreOfTheEndsOfSteps) {
  const TemporaryFolder folder;
  MetricsOptions options = make_options(folder.path());
  options.config.every = 1;
  {
    Metrics metrics(options);
    for (int64_t step = 1; step <= 5; ++step) {
      metrics.train_step({.step = step, .ended = 0.5 * static_cast<double>(step)});
    }
  }
  const std::vector<nlohmann::json> records = read_records(folder);
  ASSERT_EQ(records.size(), 5U);
  for (const nlohmann::json& record : records) EXPECT_EQ(record["train/tokens_per_second"], 200.0);
}

TEST(Metrics, MfuIsTheShareOfThePeak) {
  const TemporaryFolder folder;
  MetricsOptions options = make_options(folder.path());
  options.flops_per_token = 6e6;
  options.peak_flops = 3e12;
  {
    Metrics metrics(options);
    train(metrics, 1, 10);
  }
  const auto record = read_records(folder).back();
  const double tokens_per_second = record["train/tokens_per_second"];
  EXPECT_DOUBLE_EQ(record["train/mfu"], tokens_per_second * 6e6 / 3e12);
}

// Waits that take longer than the host has seen a step take.
TEST(Metrics, TheExposedShareIsAtMostAll) {
  const TemporaryFolder folder;
  MetricsOptions options = make_options(folder.path());
  options.world = 2;
  options.times_waits = true;
  {
    Metrics metrics(options);
    metrics.train_step({.step = 1, .waited = 1e3});
    for (int64_t step = 2; step <= 10; ++step) metrics.train_step({.step = step});
  }
  const std::vector<nlohmann::json> records = read_records(folder);
  ASSERT_EQ(records.size(), 2U);
  EXPECT_EQ(records[0]["train/exposed_communication"], 1.0);
  EXPECT_EQ(records[1]["train/exposed_communication"], 0.0);
}

// Zero would say that all communication is hidden.
TEST(Metrics, TheExposedShareIsLeftOutWhereItIsNotMeasured) {
  const TemporaryFolder folder;
  MetricsOptions options = make_options(folder.path());
  options.world = 2;
  {
    Metrics metrics(options);
    train(metrics, 1, 10);
  }
  for (const nlohmann::json& record : read_records(folder)) {
    EXPECT_FALSE(record.contains("train/exposed_communication")) << record;
  }
}

TEST(Metrics, ValidationGivesAllThreeUnits) {
  const TemporaryFolder folder;
  {
    Metrics metrics(make_options(folder.path()));
    metrics.validation(20, {.loss = std::log(16.0), .tokens = 100, .bytes = 200});
    metrics.validation(30, {.loss = 1.0, .tokens = 100, .bytes = 0});
  }
  const auto records = read_records(folder);
  ASSERT_EQ(records.size(), 2U);
  EXPECT_EQ(records[0]["step"], 20);
  EXPECT_EQ(records[0]["validation/loss"], std::log(16.0));
  EXPECT_NEAR(records[0]["validation/perplexity"], 16.0, 1e-12);
  EXPECT_NEAR(records[0]["validation/bits_per_byte"], 2.0, 1e-12);
  EXPECT_FALSE(records[1].contains("validation/bits_per_byte"));
}

TEST(Metrics, ValidationIsPrintedToo) {
  const TemporaryFolder folder;
  MetricsOptions options = make_options(folder.path());
  options.config.progress = true;
  options.progress_fd = open((folder / "screen").c_str(), O_WRONLY | O_CREAT, 0644);
  {
    Metrics metrics(options);
    metrics.validation(20, {.loss = std::log(16.0), .tokens = 100, .bytes = 200});
  }
  close(options.progress_fd);
  EXPECT_EQ(read_file(folder / "screen"),
            "validation  step 20  loss 2.7726 nats/token  2.0000 bits/byte  perplexity 16.00\n");
}

TEST(Metrics, FlushMakesRecordsVisible) {
  const TemporaryFolder folder;
  Metrics metrics(make_options(folder.path()));
  for (int64_t step = 0; step < 200; ++step) metrics.record(step, {{"own/value", 1.0}});
  metrics.flush();
  EXPECT_EQ(read_records(folder).size(), 200U);
}

TEST(Metrics, AResumedRunReadsAsOne) {
  const TemporaryFolder folder;
  MetricsOptions options = make_options(folder.path());
  {
    Metrics metrics(options);
    train(metrics, 1, 20);
    metrics.validation(20, {.loss = 1.0});
  }
  options.resumed_step = 12;
  {
    Metrics metrics(options);
    train(metrics, 13, 25);
  }
  std::vector<int64_t> steps;
  for (const auto& record : read_records(folder)) steps.push_back(record["step"]);
  EXPECT_EQ(steps, (std::vector<int64_t>{1, 10, 20, 25}));
  int64_t event_files = 0;
  for ([[maybe_unused]] const auto& entry : fs::directory_iterator(folder / "tensorboard")) {
    ++event_files;
  }
  EXPECT_EQ(event_files, 2);
}

TEST(Metrics, OtherRanksAndSwitchedOffSinksWriteNothing) {
  const TemporaryFolder folder;
  MetricsOptions options = make_options(folder.path());
  options.rank = 1;
  {
    Metrics metrics(options);
    const MetricsPause pause(metrics);
    train(metrics, 1, 25);
    metrics.validation(25, {.loss = 1.0});
    metrics.flush();
  }
  options.rank = 0;
  options.config.jsonl = false;
  options.config.tensorboard = false;
  {
    Metrics metrics(options);
    train(metrics, 1, 25);
    metrics.flush();
  }
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(Metrics, AFolderThatCannotBeMadeIsAnError) {
  const TemporaryFolder folder;
  write_file(folder / "file", "");
  try {
    const Metrics metrics(make_options(folder / "file/run"));
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kStorage);
  }
}

}  // namespace
}  // namespace sbtrain::test
