// Tensors of several chunks, data that is verified when it is read, and manifests of version 1.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "checkpoint/checkpoint.h"
#include "fixtures.h"

namespace sbtrain {
namespace {

namespace fs = std::filesystem;
using namespace sbtrain::test;  // NOLINT

constexpr int64_t kRows = 1111;
constexpr int64_t kCols = 4001;
constexpr int64_t kCount = kRows * kCols;  // 17 MiB: two whole chunks and a part
constexpr int64_t kStride = 4008;

float value(int64_t element) {
  return static_cast<float>(element % 65'537);
}

// The storage of `rows` padded rows. Logical elements have their value, or all have `fill`.
std::vector<float> padded(bool values, float fill) {
  std::vector<float> storage(static_cast<size_t>(kRows * kStride), fill);
  for (int64_t i = 0; values && i < kCount; ++i) {
    storage[static_cast<size_t>(i / kCols * kStride + i % kCols)] = value(i);
  }
  return storage;
}

TensorShard shard_of(std::vector<float>& storage, int64_t begin, int64_t end) {
  const auto at = [](int64_t i) { return i / kCols * kStride + i % kCols; };
  const int64_t count = begin == end ? 0 : at(end - 1) + 1 - at(begin);
  return {{kModelKind, "w", {kRows, kCols}, begin, end},
          Tensor(storage.data() + at(begin), DType::kF32, {count}),
          kStride};
}

fs::path save_large(const fs::path& run, int64_t step, int world = 1) {
  std::vector<float> storage = padded(true, -1);
  run_ranks(world, [&](const RankGroup& group) {
    Snapshot snapshot = test_snapshot(step, group.rank, world);
    snapshot.tensors.push_back(
        shard_of(storage, kCount * group.rank / world, kCount * (group.rank + 1) / world));
    save_checkpoint(Storage(), run, snapshot, group, 10);
  });
  return run / "checkpoints" / fmt::format("step-{:08d}", step);
}

void flip(const fs::path& file, const char* tensor, uint64_t byte) {
  const SafetensorsReader shard(file);
  std::string text = read_file(file);
  text[shard.data_offset() + shard.at(tensor).begin + byte] ^= 1;
  rewrite(file, text);
}

TEST(Chunks, PaddedRowsComeBackFromEveryWorld) {
  use_memory_for_temporary_folders();
  for (const int world : {1, 3}) {
    const TemporaryFolder run;
    const fs::path folder = save_large(run.path(), 1, world);
    EXPECT_TRUE(verify_checkpoint(folder).empty());
    for (const Verification verification : {Verification::kFull, Verification::kOnRead}) {
      const CheckpointReader reader(folder, verification);
      expect_content(reader, 1);
      std::vector<float> back = padded(false, -1);
      // The second read finds its chunks verified.
      for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{3, kCount - 5}, {0, kCount}}) {
        const TensorShard part = shard_of(back, begin, end);
        reader.read(std::span(&part, 1));
        if (begin > 0) {
          EXPECT_EQ(back[0], -1);
          EXPECT_EQ(back[3], value(3));
          EXPECT_EQ(back[static_cast<size_t>((kRows - 1) * kStride + kCols - 5)], -1);
        }
      }
      EXPECT_TRUE(back == padded(true, -1));
      std::vector<float> flat(100);
      reader.read(kModelKind, "w", kCount - 100, kCount, flat.data());
      for (int64_t i = 0; i < 100; ++i) EXPECT_EQ(flat[i], value(kCount - 100 + i));
    }
  }
}

TEST(Chunks, DamageShowsWhereItIsRead) {
  use_memory_for_temporary_folders();
  const TemporaryFolder run;
  const fs::path folder = save_large(run.path(), 1);
  const fs::path file = folder / "rank-00000-of-00001.safetensors";
  flip(file, "model/w", kChunkBytes + 77);  // in the second chunk
  const std::string full = error_of(ExitCode::kNoCheckpoint, [&] { CheckpointReader{folder}; });
  EXPECT_NE(full.find("(model/w)"), std::string::npos) << full;
  const std::vector<std::string> problems = verify_checkpoint(folder);
  ASSERT_EQ(problems.size(), 1U);
  EXPECT_NE(problems[0].find("(model/w)"), std::string::npos) << problems[0];

  const CheckpointReader reader(folder, Verification::kOnRead);
  expect_content(reader, 1);  // the other tensors
  constexpr int64_t kChunk = kChunkBytes / sizeof(float);
  std::vector<float> values(2 * kChunk);
  const auto read = [&](int64_t begin, int64_t end) {
    reader.read(kModelKind, "w", begin, end, values.data());
  };
  read(0, kChunk);
  read(2 * kChunk, kCount);
  // Any part of a chunk is as bad as the whole.
  for (const auto& range : {std::pair<int64_t, int64_t>{kChunk, 2 * kChunk},
                            {2 * kChunk - 1, 2 * kChunk},
                            {0, kChunk + 1}}) {
    const std::string message =
        error_of(ExitCode::kNoCheckpoint, [&] { read(range.first, range.second); });
    EXPECT_NE(message.find(file.string()), std::string::npos) << message;
    EXPECT_NE(message.find("(model/w)"), std::string::npos) << message;
  }
}

// What only shows when data is read still leads to the older checkpoint, on all ranks if one of
// them reads it.
TEST(Chunks, DamageFoundWhileLoadingLeadsToTheOlderCheckpoint) {
  use_memory_for_temporary_folders();
  const TemporaryFolder run;
  save_large(run.path(), 1);
  flip(save_large(run.path(), 2) / "rank-00000-of-00001.safetensors", "model/w", kChunkBytes + 1);
  for (const int world : {1, 2, 3}) {
    std::atomic<int> opened = 0;
    run_ranks(world, [&](const RankGroup& group) {
      std::vector<int64_t> tried;
      const auto use = [&](const CheckpointReader& reader) {
        tried.push_back(reader.manifest().step);
        const int64_t begin = kCount * group.rank / world;
        const int64_t end = kCount * (group.rank + 1) / world;
        std::vector<float> values(static_cast<size_t>(end - begin));
        reader.read(kModelKind, "w", begin, end, values.data());
        for (int64_t i = begin; i < end; i += 997) EXPECT_EQ(values[i - begin], value(i));
      };
      std::vector<std::string> refused;
      const auto reader = open_newest(run.path(), &refused, use, group);
      ASSERT_TRUE(reader);
      EXPECT_EQ(reader->manifest().step, 1);
      EXPECT_EQ(tried, (std::vector<int64_t>{2, 1}));
      ASSERT_EQ(refused.size(), 1U);
      EXPECT_NE(refused[0].find("step-00000002"), std::string::npos) << refused[0];
      ++opened;
    });
    EXPECT_EQ(opened, world);
  }
}

// A run that saves while its checkpoints are read removes the one that is being read: all ranks
// take the one that it has saved.
TEST(Chunks, ACheckpointThatItsRunReplacesIsNoDamage) {
  for (const int world : {1, 2, 3}) {
    const TemporaryFolder run;
    save_step(run.path(), 1);
    std::atomic<int> opened = 0;
    run_ranks(world, [&](const RankGroup& group) {
      std::vector<int64_t> tried;
      const auto use = [&](const CheckpointReader& reader) {
        const int64_t step = reader.manifest().step;
        tried.push_back(step);
        if (step == 3 || group.rank > 0) return;
        save_step(run.path(), step + 1, /*keep=*/1);
        CheckpointReader{reader.folder()};
      };
      std::vector<std::string> refused;
      const auto reader = open_newest(run.path(), &refused, use, group);
      ASSERT_TRUE(reader);
      EXPECT_EQ(reader->manifest().step, 3);
      EXPECT_EQ(tried.back(), 3);
      if (group.rank == 0) {
        EXPECT_EQ(tried, (std::vector<int64_t>{1, 2, 3}));
      }
      EXPECT_TRUE(refused.empty()) << refused.front();
      ++opened;
    });
    EXPECT_EQ(opened, world);
  }
}

// A mistake of the caller, other than damage, is no reason to try an older checkpoint.
TEST(Chunks, OtherErrorsOfTheUseAreThrown) {
  const TemporaryFolder run;
  save_step(run.path(), 1);
  save_step(run.path(), 2);
  int calls = 0;
  error_of(ExitCode::kConfig, [&] {
    open_newest(run.path(), nullptr, [&](const CheckpointReader&) {
      ++calls;
      fail(ExitCode::kConfig, "another model");
    });
  });
  EXPECT_EQ(calls, 1);
}

// A replica whose ranges another rank saves, or a rank that owns nothing.
TEST(Chunks, RanksWithoutTensorsWriteNoFile) {
  const TemporaryFolder run;
  run_ranks(4, [&](const RankGroup& group) {
    Snapshot snapshot = test_snapshot(3, group.rank / 2, 2);
    if (group.rank % 2 == 1) snapshot.tensors.clear();
    save_checkpoint(Storage(), run.path(), snapshot, group, 1);
  });
  const fs::path folder = run.path() / "checkpoints/step-00000003";
  EXPECT_EQ(
      folder_names(folder),
      (std::vector<std::string>{"config.yaml", "manifest.json", "rank-00000-of-00004.safetensors",
                                "rank-00002-of-00004.safetensors", "state.json"}));
  EXPECT_TRUE(verify_checkpoint(folder).empty());
  const auto reader = open_newest(run.path());
  ASSERT_TRUE(reader);
  expect_content(*reader, 3);
  EXPECT_EQ(reader->manifest().world, 4);
}

// Replaces the manifest, under a valid checksum of its own.
void write_manifest(const fs::path& folder, nlohmann::json manifest) {
  manifest.erase("sha256");
  std::string text = manifest.dump();
  text.pop_back();
  rewrite(folder / "manifest.json", text + ",\n\"sha256\": \"" + sha256_hex(text) + "\"\n}\n");
}

// Rewrites the manifest as version 1 had it: one checksum for each file and for each tensor.
void make_version_1(const fs::path& folder) {
  using json = nlohmann::json;
  json manifest = json::parse(read_file(folder / "manifest.json"));
  manifest["version"] = 1;
  for (json& file : manifest["files"]) {
    const fs::path path = folder / file["name"].get<std::string>();
    file["sha256"] = sha256_hex(read_file(path));
    if (file["tensors"].empty()) continue;
    const SafetensorsReader shard(path);
    for (auto& [key, tensor] : file["tensors"].items()) {
      const SafetensorsEntry& entry = shard.at(key);
      tensor["sha256"] = InputFile(path).sha256(shard.data_offset() + entry.begin, entry.bytes());
    }
  }
  write_manifest(folder, std::move(manifest));
}

TEST(Chunks, Version1IsRead) {
  use_memory_for_temporary_folders();
  const TemporaryFolder run;
  const fs::path folder = save_large(run.path(), 1, 2);
  make_version_1(folder);
  EXPECT_EQ(read_manifest(folder).version, 1);
  EXPECT_TRUE(verify_checkpoint(folder).empty());
  for (const Verification verification : {Verification::kFull, Verification::kOnRead}) {
    const CheckpointReader reader(folder, verification);
    expect_content(reader, 1);
    std::vector<float> back = padded(false, -1);
    const TensorShard whole = shard_of(back, 0, kCount);
    reader.read(std::span(&whole, 1));
    EXPECT_TRUE(back == padded(true, -1));
  }
  flip(folder / "rank-00001-of-00002.safetensors", "model/w", 12);
  for (const Verification verification : {Verification::kFull, Verification::kOnRead}) {
    const std::string message =
        error_of(ExitCode::kNoCheckpoint, [&] { CheckpointReader(folder, verification); });
    EXPECT_NE(message.find("(model/w)"), std::string::npos) << message;
  }
  ASSERT_EQ(verify_checkpoint(folder).size(), 1U);
}

// Loading relies on the checksum of the file alone; a manifest that contradicts itself was written
// by no save.
TEST(Chunks, TheChecksumsOfTensorsOfVersion1AreVerifiedToo) {
  const TemporaryFolder run;
  const fs::path folder = save_step(run.path(), 1);
  make_version_1(folder);
  nlohmann::json manifest = nlohmann::json::parse(read_file(folder / "manifest.json"));
  std::string key;
  for (nlohmann::json& file : manifest["files"]) {
    if (file["tensors"].empty()) continue;
    key = file["tensors"].begin().key();
    file["tensors"][key]["sha256"] = sha256_hex("other data");
  }
  write_manifest(folder, std::move(manifest));
  const std::vector<std::string> problems = verify_checkpoint(folder);
  ASSERT_EQ(problems.size(), 1U);
  EXPECT_NE(problems[0].find("(" + key + ")"), std::string::npos) << problems[0];
}

TEST(Chunks, AManifestListsEveryChunk) {
  use_memory_for_temporary_folders();
  const TemporaryFolder run;
  const fs::path folder = save_large(run.path(), 1);
  using json = nlohmann::json;
  json manifest = json::parse(read_file(folder / "manifest.json"));
  manifest.erase("sha256");
  const auto refusal = [&](const json& digests) {
    json changed = manifest;
    for (json& file : changed["files"]) {
      if (!file["tensors"].empty()) file["tensors"]["model/w"]["sha256"] = digests;
    }
    std::string text = changed.dump();
    text.pop_back();
    text += ",\n\"sha256\": \"" + sha256_hex(text) + "\"\n}\n";
    return error_of(ExitCode::kNoCheckpoint, [&] { parse_manifest(text, "manifest.json"); });
  };
  EXPECT_NE(refusal({"a", "b"}).find("model/w"), std::string::npos);
  EXPECT_NE(refusal({"a", "b", "c", "d"}).find("model/w"), std::string::npos);
  EXPECT_FALSE(refusal("a").empty());
  EXPECT_FALSE(refusal({1, 2, 3}).empty());
}

}  // namespace
}  // namespace sbtrain
