// Snapshots that are completely determined by the step, for any number of ranks.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "core/error.h"
#include "core/philox.h"
#include "optim/adamw.h"
#include "support/process.h"

namespace sbtrain::test {

struct NamedShape {
  const char* name;
  std::vector<int64_t> shape;
};

// Odd sizes, a scalar, an empty tensor, and one smaller than the number of ranks.
inline const std::vector<NamedShape>& test_tensors() {
  static const std::vector<NamedShape> tensors = {{"model.embed_tokens.weight", {37, 11}},
                                                  {"model.layers.0.norm", {7}},
                                                  {"model.layers.0.mlp.up", {5, 3, 13}},
                                                  {"model.scalar", {}},
                                                  {"model.tiny", {3}},
                                                  {"model.empty", {0, 4}}};
  return tensors;
}

// Any bit pattern may occur, NaN payloads, infinities and denormals included.
inline float test_value(int64_t step, const std::string& key, int64_t element) {
  const Philox random(7, RandomPurpose::kTest, key, static_cast<uint64_t>(step));
  if (element % 5 == 0) return std::bit_cast<float>(0x7f800001U + random.bits(element) % 0x7ffffeU);
  return std::bit_cast<float>(random.bits(element));
}

inline std::vector<float> test_values(int64_t step, std::string_view kind, const NamedShape& tensor,
                                      int64_t begin, int64_t end) {
  const std::string key = fmt::format("{}/{}", kind, tensor.name);
  std::vector<float> values;
  for (int64_t i = begin; i < end; ++i) values.push_back(test_value(step, key, i));
  return values;
}

inline constexpr const char* kKinds[] = {kModelKind, kAdamM, kAdamV};

// A range with the values that it has in a snapshot.
struct TestShard : TensorRange {
  std::vector<float> values;
};

inline std::vector<TestShard> test_shards(int64_t step, int rank = 0, int world = 1) {
  std::vector<TestShard> shards;
  for (const char* kind : kKinds) {
    for (const NamedShape& tensor : test_tensors()) {
      const int64_t numel = checked_numel(tensor.shape);
      const int64_t begin = numel * rank / world;
      const int64_t end = numel * (rank + 1) / world;
      shards.push_back({{kind, tensor.name, tensor.shape, begin, end},
                        test_values(step, kind, tensor, begin, end)});
    }
  }
  return shards;
}

// Makes the snapshot own the shards and hold them.
inline void set_tensors(Snapshot& snapshot, std::vector<TestShard> shards) {
  const auto memory = std::make_shared<std::vector<TestShard>>(std::move(shards));
  snapshot.tensors.clear();
  for (TestShard& shard : *memory) {
    const auto count = static_cast<int64_t>(shard.values.size());
    snapshot.tensors.push_back({shard, Tensor(shard.values.data(), DType::kF32, {count}), 0});
  }
  snapshot.memory = memory;
}

inline Snapshot test_snapshot(int64_t step, int rank = 0, int world = 1) {
  Snapshot snapshot;
  snapshot.step = step;
  snapshot.tokens = step * 1024;
  set_tensors(snapshot, test_shards(step, rank, world));
  snapshot.state_json = fmt::format(R"({{"step": {}, "note": "kept as it is"}})", step);
  snapshot.config_yaml = "name: test\n";
  snapshot.fingerprints = {{"config", "c0ffee"}, {"data", "beef"}};
  return snapshot;
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

// Places this process's temporary folders in memory from now on, for tests that save hundreds of
// times. A killed process leaves the same files there as on a disk; only a power failure would not.
inline void use_memory_for_temporary_folders() {
  if (std::filesystem::is_directory("/dev/shm")) setenv("TMPDIR", "/dev/shm", 1);
}

// Replaces a file. It is removed first, because truncation makes ext4 flush it to disk slowly.
inline void rewrite(const std::filesystem::path& path, const std::string& text) {
  std::filesystem::remove(path);
  write_file(path, text);
}

// Checks that every bit of the checkpoint equals that of test_snapshot(step).
inline void expect_content(const CheckpointReader& reader, int64_t step) {
  EXPECT_EQ(reader.manifest().step, step);
  EXPECT_EQ(reader.manifest().tokens, step * 1024);
  const Snapshot expected = test_snapshot(step);
  EXPECT_EQ(reader.state_json(), expected.state_json);
  EXPECT_EQ(reader.config_yaml(), expected.config_yaml);
  EXPECT_EQ(reader.manifest().fingerprints, expected.fingerprints);
  for (const TestShard& tensor : test_shards(step)) {
    ASSERT_TRUE(reader.has(tensor.kind, tensor.name)) << tensor.name;
    EXPECT_EQ(reader.shape(tensor.kind, tensor.name), tensor.shape);
    std::vector<float> values(tensor.values.size());
    reader.read(tensor.kind, tensor.name, 0, tensor.end, values.data());
    EXPECT_TRUE(same_bits(values, tensor.values)) << tensor.name << " at step " << step;
  }
}

// Runs body(group) for every rank of a simulated world, each on its own thread.
inline void run_ranks(int world, const std::function<void(const RankGroup&)>& body) {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::string> texts(world);
  std::vector<std::string> ready;
  int arrived = 0;
  int64_t round = 0;
  const auto exchange = [&](int rank, std::string mine) {
    std::unique_lock lock(mutex);
    const int64_t entered = round;
    texts[rank] = std::move(mine);
    if (++arrived == world) {
      ready = texts;
      arrived = 0;
      ++round;
      changed.notify_all();
    } else {
      changed.wait(lock, [&] { return round != entered; });
    }
    return ready;
  };
  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(world));
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      body({rank, world, [&, rank](std::string mine) { return exchange(rank, std::move(mine)); }});
    });
  }
  for (std::thread& thread : threads) thread.join();
}

inline std::filesystem::path save_step(const std::filesystem::path& run, int64_t step,
                                       int64_t keep = 10, const Storage& storage = Storage()) {
  return save_checkpoint(storage, run, test_snapshot(step), RankGroup{}, keep).folder;
}

inline std::vector<std::string> folder_names(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

// The message of the Error that `body` throws, which must have this code.
inline std::string error_of(ExitCode code, const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(static_cast<int>(error.code()), static_cast<int>(code)) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error was thrown";
  return "";
}

}  // namespace sbtrain::test
