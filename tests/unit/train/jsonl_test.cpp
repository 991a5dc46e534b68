#include "train/jsonl.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "support/process.h"

namespace sbtrain::test {
namespace {

std::vector<nlohmann::json> read_records(const std::string& path) {
  std::vector<nlohmann::json> records;
  std::istringstream in(read_file(path));
  for (std::string line; std::getline(in, line);) records.push_back(nlohmann::json::parse(line));
  return records;
}

std::vector<int64_t> steps(const std::string& path) {
  std::vector<int64_t> steps;
  for (const auto& record : read_records(path)) steps.push_back(record["step"]);
  return steps;
}

void write_steps(JsonlWriter& writer, int64_t first, int64_t last) {
  for (int64_t step = first; step <= last; ++step) {
    writer.write({step, 1.5, {{"train/loss", 1.0 / static_cast<double>(step)}}});
  }
}

TEST(Jsonl, OneObjectPerLineWithExactValues) {
  const TemporaryFolder folder;
  JsonlWriter writer(folder / "m.jsonl", {}, 1024);
  writer.write({10, 1700000000.25, {{"train/loss", 0.1 + 0.2}, {"train/lr", 3e-4}}});
  writer.write({20, 1700000001.0, {{"train/loss", std::nan("")}}});
  const auto records = read_records(folder / "m.jsonl");
  ASSERT_EQ(records.size(), 2U);
  EXPECT_EQ(records[0]["step"], 10);
  EXPECT_EQ(records[0]["tokens"], 10240);
  EXPECT_EQ(records[0]["time"], 1700000000.25);
  EXPECT_EQ(records[0]["train/loss"].get<double>(), 0.1 + 0.2);
  EXPECT_EQ(records[0]["train/lr"].get<double>(), 3e-4);
  EXPECT_TRUE(records[1]["train/loss"].is_null());
}

TEST(Jsonl, ARecordIsOnDiskWhenWriteReturns) {
  const TemporaryFolder folder;
  JsonlWriter writer(folder / "m.jsonl", {}, 1);
  for (int64_t step = 1; step <= 3; ++step) {
    write_steps(writer, step, step);
    EXPECT_EQ(steps(folder / "m.jsonl").size(), static_cast<size_t>(step));
  }
}

TEST(Jsonl, ResumingCutsOffLaterRecords) {
  const TemporaryFolder folder;
  const std::string path = folder / "m.jsonl";
  {
    JsonlWriter writer(path, {}, 1);
    write_steps(writer, 1, 9);
  }
  JsonlWriter writer(path, 5, 1);
  EXPECT_EQ(steps(path), (std::vector<int64_t>{1, 2, 3, 4, 5}));
  write_steps(writer, 6, 7);
  EXPECT_EQ(steps(path), (std::vector<int64_t>{1, 2, 3, 4, 5, 6, 7}));
  EXPECT_FALSE(std::filesystem::exists(path + ".tmp"));
}

TEST(Jsonl, ResumingRemovesATornLine) {
  const TemporaryFolder folder;
  const std::string path = folder / "m.jsonl";
  for (const char* torn : {"{\"step\":2,\"tok", "{\"step\":2}"}) {
    write_file(path, std::string("{\"step\":1}\n") + torn);
    JsonlWriter writer(path, 100, 1);
    write_steps(writer, 3, 3);
    EXPECT_EQ(steps(path), (std::vector<int64_t>{1, 3})) << torn;
  }
}

TEST(Jsonl, ResumingSurvivesLinesThatAreNoRecords) {
  const TemporaryFolder folder;
  const std::string path = folder / "m.jsonl";
  write_file(path,
             "{\"step\":1}\n\n[1]\n{\"step\":\"2\"}\n\xff\xfe{\n{\"loss\":1}\n{\"step\":3}\n");
  const JsonlWriter writer(path, 100, 1);
  EXPECT_EQ(steps(path), (std::vector<int64_t>{1, 3}));
}

TEST(Jsonl, AFreshRunKeepsTheEarlierFileAside) {
  const TemporaryFolder folder;
  const std::string path = folder / "m.jsonl";
  write_file(path, "{\"step\":1}\n");
  JsonlWriter writer(path, {}, 1);
  write_steps(writer, 2, 2);
  EXPECT_EQ(steps(path), (std::vector<int64_t>{2}));
  EXPECT_EQ(steps(path + ".old"), (std::vector<int64_t>{1}));
}

}  // namespace
}  // namespace sbtrain::test
