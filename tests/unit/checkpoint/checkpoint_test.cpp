#include "checkpoint/checkpoint.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <random>

#include "checkpoint/stored_runs.h"
#include "fixtures.h"
#include "job/control.h"

namespace sbtrain {
namespace {

namespace fs = std::filesystem;
using namespace sbtrain::test;  // NOLINT

fs::path shard_path(const fs::path& folder) {
  return folder / "rank-00000-of-00001.safetensors";
}

TEST(Checkpoint, RoundTripIsBitwise) {
  TemporaryFolder run;
  const fs::path folder = save_step(run.path(), 100);
  EXPECT_EQ(folder.filename(), "step-00000100");
  EXPECT_EQ(read_file(run.path() / "checkpoints" / "latest"), "step-00000100\n");
  const CheckpointReader reader(folder);
  expect_content(reader, 100);
  EXPECT_EQ(reader.names(kAdamV).size(), test_tensors().size());
  EXPECT_TRUE(verify_checkpoint(folder).empty());
  EXPECT_TRUE(verify_latest(run.path()).empty());
  EXPECT_EQ(folder_names(run.path() / "checkpoints"),
            (std::vector<std::string>{"latest", "step-00000100"}));
}

// Whenever the run folder is moved away, a save ends, and leaves nothing at the path: another job
// may have begun there.
TEST(Checkpoint, AFolderThatIsMovedIsNotMadeAgain) {
  for (int at = 0;; ++at) {
    TemporaryFolder parent;
    const fs::path run = parent.path() / "run";
    fs::create_directory(run);
    save_step(run, 100);
    int operations = 0;
    const Storage storage(IoHook([&](std::string_view, const fs::path&) {
      if (operations++ == at) fs::rename(run, parent.path() / "moved");
      return 0;
    }));
    std::string failure;
    try {
      save_step(run, 200, 10, storage);
    } catch (const Error& e) {
      failure = e.what();
      EXPECT_EQ(e.code(), ExitCode::kStorage) << failure;
    }
    if (operations <= at) break;  // a save has no more operations than that
    EXPECT_FALSE(fs::exists(run)) << "moved at operation " << at << ": " << failure;
    ASSERT_LT(at, 200);
  }
}

TEST(Checkpoint, PartialReadsAndMisuse) {
  TemporaryFolder run;
  const CheckpointReader reader(save_step(run.path(), 1));
  const NamedShape& tensor = test_tensors()[0];
  for (const auto& [begin, end] :
       {std::pair<int64_t, int64_t>{0, 0}, {5, 6}, {10, 300}, {407, 407}}) {
    std::vector<float> values(static_cast<size_t>(end - begin));
    reader.read(kAdamM, tensor.name, begin, end, values.data());
    EXPECT_TRUE(same_bits(values, test_values(1, kAdamM, tensor, begin, end)));
  }
  float sink = 0;
  const auto read = [&](const char* name, int64_t begin, int64_t end) {
    return error_of(ExitCode::kNoCheckpoint,
                    [&] { reader.read(kModelKind, name, begin, end, &sink); });
  };
  EXPECT_NE(read("model.absent", 0, 1).find("model.absent"), std::string::npos);
  EXPECT_NE(read(tensor.name, -1, 0).find(tensor.name), std::string::npos);
  EXPECT_NE(read(tensor.name, 407, 408).find(tensor.name), std::string::npos);
  EXPECT_NE(read(tensor.name, 2, 1).find(tensor.name), std::string::npos);
}

TEST(Checkpoint, PythonReadsAShard) {
  if (!fs::exists("/usr/bin/python3")) GTEST_SKIP() << "no /usr/bin/python3";
  TemporaryFolder run;
  const fs::path folder = save_step(run.path(), 3);
  Process python({"/usr/bin/python3", SBTRAIN_CHECK_SCRIPT, shard_path(folder)}, run / "log");
  EXPECT_EQ(python.wait(), 0) << python.output();
  EXPECT_NE(python.output().find("model/model.embed_tokens.weight F32 [37, 11]"),
            std::string::npos);
}

// Storage rows of 8, logical rows of 5: a snapshot holds the logical elements only.
TEST(Checkpoint, PaddedRowsAreStoredUnpadded) {
  constexpr int64_t kRows = 6;
  constexpr int64_t kCols = 5;
  constexpr int64_t kStride = 8;
  std::vector<float> storage(kRows * kStride, -1.0F);
  for (int64_t i = 0; i < kRows * kCols; ++i) {
    storage[i / kCols * kStride + i % kCols] = static_cast<float>(i);
  }
  for (const auto& range :
       {std::pair<int64_t, int64_t>{0, 30}, {3, 27}, {5, 10}, {7, 8}, {4, 6}, {9, 9}}) {
    const int64_t begin = range.first;
    const int64_t end = range.second;
    const int64_t at = begin / kCols * kStride + begin % kCols;
    const int64_t last = std::max(end - 1, begin);
    const int64_t count = last / kCols * kStride + last % kCols - at + (end > begin);
    const Tensor stored(storage.data() + at, DType::kF32, {count});
    const TensorShard shard{{kModelKind, "w", {kRows, kCols}, begin, end}, stored, kStride};
    int64_t next = begin;
    for_each_stored_run(shard, begin, end, [&](int64_t logical, int64_t at_stored, int64_t n) {
      EXPECT_EQ(logical, next - begin);
      for (int64_t i = 0; i < n; ++i) EXPECT_EQ(stored.f32()[at_stored + i], next + i);
      next += n;
    });
    EXPECT_EQ(next, end);
  }
  const Tensor all(storage.data(), DType::kF32, {kRows * kStride});
  const TensorShard whole{{kModelKind, "w", {kRows, kCols}, 0, 30}, all, kStride};
  Snapshot snapshot;
  snapshot.tensors = {whole};

  TemporaryFolder run;
  const CheckpointReader reader(
      save_checkpoint(Storage(), run.path(), snapshot, RankGroup{}, 1).folder);
  std::vector<float> back(kRows * kStride, -1.0F);
  const auto read = [&](int64_t begin, int64_t end, float* to, int64_t count) {
    const TensorShard shard{
        {kModelKind, "w", {kRows, kCols}, begin, end}, Tensor(to, DType::kF32, {count}), kStride};
    reader.read(std::span(&shard, 1));
  };
  read(0, 30, back.data(), kRows * kStride);
  EXPECT_EQ(back, storage);
  std::vector<float> part(kRows * kStride, -1.0F);
  read(7, 22, part.data() + kStride + 2, 3 * kStride);
  for (int64_t i = 7; i < 22; ++i) {
    EXPECT_EQ(part[i / kCols * kStride + i % kCols], static_cast<float>(i));
  }
  EXPECT_EQ(std::count(part.begin(), part.end(), -1.0F), kRows * kStride - 15);
}

TEST(Checkpoint, AnyWorldReadsAnyWorld) {
  TemporaryFolder run;
  const auto save = [&](int64_t step, int world) {
    run_ranks(world, [&](const RankGroup& group) {
      save_checkpoint(Storage(), run.path(), test_snapshot(step, group.rank, world), group, 10);
    });
  };
  const auto expect_shards = [&](int64_t step, int world) {
    const auto reader = open_newest(run.path());
    ASSERT_TRUE(reader);
    EXPECT_EQ(reader->manifest().step, step);
    for (int rank = 0; rank < world; ++rank) {
      for (const TestShard& tensor : test_shards(step, rank, world)) {
        std::vector<float> values(tensor.values.size());
        reader->read(tensor.kind, tensor.name, tensor.begin, tensor.end, values.data());
        EXPECT_TRUE(same_bits(values, tensor.values)) << tensor.name;
      }
    }
  };
  int64_t step = 10;
  for (const int world : {4, 2, 4, 1, 3}) {
    save(step, world);
    for (const int readers : {1, 2, 3, 4, 7}) expect_shards(step, readers);
    expect_content(*open_newest(run.path()), step);
    EXPECT_EQ(open_newest(run.path())->manifest().world, world);
    ++step;
  }
}

TEST(Checkpoint, AJobOfOneIsAGroup) {
  const std::unique_ptr<Control> control = make_single_control();
  const RankGroup group = make_rank_group(*control);
  EXPECT_EQ(group.rank, 0);
  EXPECT_EQ(group.world, 1);
  EXPECT_EQ(group.exchange("mine"), std::vector<std::string>{"mine"});
}

TEST(Checkpoint, AFailingRankFailsAll) {
  TemporaryFolder run;
  save_step(run.path(), 1);
  std::atomic<int> failed = 0;
  run_ranks(4, [&](const RankGroup& group) {
    const Storage storage([&](std::string_view operation, const fs::path&) {
      return group.rank == 2 && operation == "write" ? ENOSPC : 0;
    });
    const std::string message = error_of(ExitCode::kStorage, [&] {
      save_checkpoint(storage, run.path(), test_snapshot(2, group.rank, 4), group, 1);
    });
    if (message.find("rank 2") != std::string::npos) ++failed;
  });
  EXPECT_EQ(failed, 4);
  EXPECT_EQ(folder_names(run.path() / "checkpoints"),
            (std::vector<std::string>{"latest", "step-00000001"}));
  expect_content(*open_newest(run.path()), 1);
}

TEST(Checkpoint, RetentionKeepsTheNewest) {
  TemporaryFolder run;
  for (int64_t step = 1; step <= 5; ++step) save_step(run.path(), step, 2);
  EXPECT_EQ(folder_names(run.path() / "checkpoints"),
            (std::vector<std::string>{"latest", "step-00000004", "step-00000005"}));
  save_step(run.path(), 6, 0);  // never fewer than one
  EXPECT_EQ(folder_names(run.path() / "checkpoints"),
            (std::vector<std::string>{"latest", "step-00000006"}));
}

fs::path save_knowing(const fs::path& run, int64_t step, int64_t last_good, int64_t keep) {
  Snapshot snapshot = test_snapshot(step);
  snapshot.last_good = last_good;
  return save_checkpoint(Storage(), run, snapshot, RankGroup{}, keep).folder;
}

// However many newer ones there are, since those of a run that diverges are all bad.
TEST(Checkpoint, TheOneKnownToBeGoodIsKept) {
  TemporaryFolder run;
  save_knowing(run.path(), 1, -1, 1);
  error_of(ExitCode::kNoCheckpoint, [&] { resume_checkpoint(run.path(), "last-good"); });
  save_knowing(run.path(), 2, 1, 1);
  for (int64_t step = 3; step <= 5; ++step) save_knowing(run.path(), step, 2, 1);
  EXPECT_EQ(folder_names(run.path() / "checkpoints"),
            (std::vector<std::string>{"latest", "step-00000002", "step-00000005"}));
  EXPECT_EQ(resume_checkpoint(run.path(), "auto")->manifest().step, 5);
  EXPECT_EQ(resume_checkpoint(run.path(), "last-good")->manifest().step, 2);
  save_knowing(run.path(), 6, 5, 1);
  EXPECT_EQ(folder_names(run.path() / "checkpoints"),
            (std::vector<std::string>{"latest", "step-00000005", "step-00000006"}));
  EXPECT_EQ(resume_checkpoint(run.path(), "last-good")->manifest().step, 5);
}

// A manifest with such a number would make every newer checkpoint look older, and be removed.
TEST(Checkpoint, CountersThatNoSaveReachesAreRefused) {
  TemporaryFolder run;
  const fs::path folder = save_step(run.path(), 1);
  const Manifest good = read_manifest(folder);
  const auto refused = [&](const char* key, auto&& change) {
    Manifest manifest = good;
    change(manifest);
    rewrite(folder / "manifest.json", format_manifest(manifest));
    const std::string message = error_of(ExitCode::kNoCheckpoint, [&] { read_manifest(folder); });
    EXPECT_NE(message.find(key), std::string::npos) << message;
  };
  refused("sequence", [](Manifest& m) { m.sequence = INT64_MAX; });
  refused("sequence", [](Manifest& m) { m.sequence = -1; });
  refused("step", [](Manifest& m) { m.step = -1; });
  refused("tokens", [](Manifest& m) { m.tokens = -1; });
  refused("world", [](Manifest& m) { m.world = 0; });
  refused("last_good", [](Manifest& m) { m.last_good = 2; });
  // The largest number that is accepted can be followed.
  Manifest last = good;
  last.sequence = kMaxSequence;
  rewrite(folder / "manifest.json", format_manifest(last));
  for (const int64_t step : {2, 3}) {
    save_step(run.path(), step, 1);
    EXPECT_EQ(open_newest(run.path())->manifest().step, step);
  }
}

// A folder that was moved is not made again, where another job could begin with the same path.
TEST(Checkpoint, AMissingRunFolderIsNotMade) {
  TemporaryFolder folder;
  const std::string message = error_of(ExitCode::kStorage, [&] { save_step(folder / "run", 1); });
  EXPECT_NE(message.find("gone"), std::string::npos) << message;
  EXPECT_FALSE(fs::exists(folder / "run"));
}

TEST(Checkpoint, NewestAfterASave) {
  TemporaryFolder run;
  EXPECT_EQ(last_sequence(run.path()), 0);
  EXPECT_FALSE(open_newest_after(run.path(), 0));
  for (const int64_t step : {5, 9, 2}) save_step(run.path(), step);
  EXPECT_EQ(last_sequence(run.path()), 3);
  EXPECT_EQ(open_newest_after(run.path(), 2)->manifest().step, 2);
  EXPECT_FALSE(open_newest_after(run.path(), 3));
}

// The removal of a folder takes many steps, so the folder must be renamed first.
TEST(Checkpoint, OnlyRenamedFoldersAreRemoved) {
  TemporaryFolder run;
  int removed = 0;
  const Storage storage([&](std::string_view operation, const fs::path& path) {
    if (operation == "remove") {
      EXPECT_EQ(path.extension(), ".tmp") << path;
      ++removed;
    }
    return 0;
  });
  for (const int64_t step : {1, 2, 3, 3}) save_step(run.path(), step, 1, storage);
  EXPECT_GT(removed, 2);
}

TEST(Checkpoint, DamagedOnesDoNotCountAsKept) {
  TemporaryFolder run;
  for (int64_t step = 1; step <= 4; ++step) save_step(run.path(), step, 3);
  rewrite(run.path() / "checkpoints/step-00000004/manifest.json", "");
  save_step(run.path(), 5, 3);  // 5, 3, 2 are good; 4 lies between them
  EXPECT_EQ(folder_names(run.path() / "checkpoints"),
            (std::vector<std::string>{"latest", "step-00000002", "step-00000003", "step-00000004",
                                      "step-00000005"}));
  for (int64_t step = 6; step <= 7; ++step) save_step(run.path(), step, 3);
  EXPECT_EQ(
      folder_names(run.path() / "checkpoints"),
      (std::vector<std::string>{"latest", "step-00000005", "step-00000006", "step-00000007"}));
}

// After going back to step 1, step 2 of the new branch is newer than step 9 of the old one.
TEST(Checkpoint, NewestIsTheLastSaved) {
  TemporaryFolder run;
  for (const int64_t step : {1, 5, 9, 2}) save_step(run.path(), step);
  expect_content(*open_newest(run.path()), 2);
  EXPECT_EQ(list_checkpoints(run.path()).size(), 4U);
  EXPECT_EQ(read_file(run.path() / "checkpoints/latest"), "step-00000002\n");
}

TEST(Checkpoint, SavingAStepAgainReplacesItInOneStep) {
  for (const int error : {0, EINVAL}) {  // with and without a file system that can exchange
    TemporaryFolder run;
    const Storage storage([&](std::string_view operation, const fs::path&) {
      return operation == "exchange" ? error : 0;
    });
    const fs::path folder = save_step(run.path(), 7);
    Snapshot other = test_snapshot(7);
    other.state_json = "{}";
    save_checkpoint(storage, run.path(), other, RankGroup{}, 3);
    EXPECT_EQ(CheckpointReader(folder).state_json(), "{}");
    EXPECT_EQ(folder_names(run.path() / "checkpoints"),
              (std::vector<std::string>{"latest", "step-00000007"}));
    EXPECT_EQ(open_newest(run.path())->manifest().sequence, 2);
  }
}

TEST(Checkpoint, LeftoversAreRemoved) {
  TemporaryFolder run;
  save_step(run.path(), 1);
  const fs::path parent = run.path() / "checkpoints";
  fs::copy(parent / "step-00000001", parent / "step-00000002.tmp", fs::copy_options::recursive);
  fs::create_directory(parent / "step-notes");
  fs::create_directory(parent / "mine.tmp");
  rewrite(parent / "latest.tmp", "x");
  expect_content(*open_newest(run.path()), 1);  // not mistaken for a checkpoint
  clean_up_checkpoints(Storage(), run.path());
  EXPECT_EQ(folder_names(parent),
            (std::vector<std::string>{"latest", "mine.tmp", "step-00000001", "step-notes"}));
}

TEST(Checkpoint, SetAsideIsFoundAndPutBack) {
  TemporaryFolder run;
  save_step(run.path(), 1);
  const fs::path parent = run.path() / "checkpoints";
  fs::rename(parent / "step-00000001", parent / "step-00000001.old");
  expect_content(*open_newest(run.path()), 1);
  clean_up_checkpoints(Storage(), run.path());
  expect_content(CheckpointReader(parent / "step-00000001"), 1);
}

TEST(Checkpoint, ResumeChoices) {
  TemporaryFolder run;
  EXPECT_FALSE(resume_checkpoint(run.path(), "auto"));
  error_of(ExitCode::kNoCheckpoint, [&] { resume_checkpoint(run.path(), run.path().string()); });
  error_of(ExitCode::kNoCheckpoint, [&] { resume_checkpoint(run.path(), "/does/not/exist"); });
  const fs::path one = save_step(run.path(), 1);
  save_step(run.path(), 2);
  EXPECT_FALSE(resume_checkpoint(run.path(), "none"));
  EXPECT_EQ(resume_checkpoint(run.path(), "auto")->manifest().step, 2);
  EXPECT_EQ(resume_checkpoint(run.path(), one.string())->manifest().step, 1);
  EXPECT_EQ(resume_checkpoint(run.path(), one.string() + "/")->manifest().step, 1);
  EXPECT_EQ(resume_checkpoint(run.path(), run.path().string())->manifest().step, 2);
  EXPECT_EQ(resume_checkpoint(run.path(), "1")->manifest().step, 1);
  error_of(ExitCode::kNoCheckpoint, [&] { resume_checkpoint(run.path(), "3"); });
  rewrite(one / "manifest.json", "");
  const std::string message =
      error_of(ExitCode::kNoCheckpoint, [&] { resume_checkpoint(run.path(), one.string()); });
  EXPECT_NE(message.find("manifest.json"), std::string::npos);
  EXPECT_EQ(resume_checkpoint(run.path(), "auto")->manifest().step, 2);
}

TEST(Checkpoint, NoneLeftIsAnError) {
  TemporaryFolder run;
  for (const int64_t step : {1, 2}) write_file(save_step(run.path(), step) / "state.json", "{");
  const std::string message =
      error_of(ExitCode::kNoCheckpoint, [&] { resume_checkpoint(run.path(), "auto"); });
  EXPECT_NE(message.find("step-00000001/state.json"), std::string::npos) << message;
  EXPECT_NE(message.find("step-00000002/state.json"), std::string::npos) << message;
}

// The shards together must hold every element once, even if all checksums match.
TEST(Checkpoint, MissingAndDoubledRangesAreRefused) {
  for (const bool doubled : {false, true}) {
    TemporaryFolder run;
    run_ranks(2, [&](const RankGroup& group) {
      Snapshot snapshot = test_snapshot(1, group.rank, 2);
      std::vector<TestShard> shards = test_shards(1, group.rank, 2);
      TestShard& tensor = shards[0];
      if (group.rank == 1 && doubled) {
        tensor.begin -= 1;
        tensor.values.insert(tensor.values.begin(), 0.0F);
      } else if (group.rank == 1) {
        tensor.begin += 1;
        tensor.values.erase(tensor.values.begin());
      }
      set_tensors(snapshot, std::move(shards));
      save_checkpoint(Storage(), run.path(), snapshot, group, 1);
    });
    const std::string message = error_of(ExitCode::kNoCheckpoint, [&] { open_newest(run.path()); });
    EXPECT_NE(message.find("model/model.embed_tokens.weight"), std::string::npos) << message;
  }
}

// ---- damage

class Damage : public testing::Test {
 protected:
  void SetUp() override {
    old_ = save_step(run_.path(), 100);
    new_ = save_step(run_.path(), 200);
  }

  // The damaged file is named and the older checkpoint chosen before any value is read.
  void expect_refused(const std::string& file) {
    std::vector<std::string> refused;
    const auto reader = open_newest(run_.path(), &refused);
    ASSERT_TRUE(reader);
    ASSERT_EQ(reader->manifest().step, 100) << file;
    ASSERT_EQ(refused.size(), 1U);
    ASSERT_NE(refused[0].find("step-00000200/" + file), std::string::npos) << refused[0];
    ASSERT_FALSE(verify_checkpoint(new_).empty());
  }

  TemporaryFolder run_;
  fs::path old_;
  fs::path new_;
};

TEST_F(Damage, TruncatedFilesAreRefused) {
  for (const std::string& file : folder_names(new_)) {
    const std::string good = read_file(new_ / file);
    for (const size_t size : {size_t{0}, good.size() / 2, good.size() - 1}) {
      rewrite(new_ / file, good.substr(0, size));
      expect_refused(file);
    }
    rewrite(new_ / file, good + "x");
    expect_refused(file);
    fs::remove(new_ / file);
    expect_refused(file);
    rewrite(new_ / file, good);
    EXPECT_EQ(open_newest(run_.path())->manifest().step, 200);
  }
}

TEST_F(Damage, FlippedBitsAreRefused) {
  std::mt19937 random(3);
  for (const std::string& file : folder_names(new_)) {
    const std::string good = read_file(new_ / file);
    const int flips = std::min<int>(400, static_cast<int>(good.size()) * 8);
    for (int i = 0; i < flips; ++i) {
      const size_t bit = random() % (good.size() * 8);
      std::string bad = good;
      bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << bit % 8));
      rewrite(new_ / file, bad);
      expect_refused(file);
      if (HasFatalFailure()) FAIL() << "bit " << bit << " of " << file;
    }
    rewrite(new_ / file, good);
  }
  expect_content(*open_newest(run_.path()), 200);
}

TEST_F(Damage, EveryBitOfTheManifestCounts) {
  const std::string good = read_file(new_ / "manifest.json");
  for (size_t bit = 0; bit < good.size() * 8; ++bit) {
    std::string bad = good;
    bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << bit % 8));
    EXPECT_THROW(parse_manifest(bad, "manifest.json"), Error) << "bit " << bit;
  }
  EXPECT_EQ(parse_manifest(good, "manifest.json").step, 200);
}

TEST_F(Damage, ADamagedTensorIsNamed) {
  const fs::path path = shard_path(new_);
  const SafetensorsReader shard(path);
  const SafetensorsEntry& entry = shard.at("adam_v/model.layers.0.mlp.up");
  std::string text = read_file(path);
  text[shard.data_offset() + entry.begin + 5] ^= 1;
  rewrite(path, text);
  const std::vector<std::string> problems = verify_checkpoint(new_);
  ASSERT_EQ(problems.size(), 1U);
  EXPECT_NE(problems[0].find("(adam_v/model.layers.0.mlp.up)"), std::string::npos) << problems[0];
}

TEST_F(Damage, FilesOfAnotherCheckpointAreRefused) {
  for (const std::string& file : folder_names(new_)) {
    if (file == "config.yaml") continue;  // the same in both
    const std::string good = read_file(new_ / file);
    rewrite(new_ / file, read_file(old_ / file));
    expect_refused(file);
    rewrite(new_ / file, good);
  }
}

// `latest` is for people and scripts: damage is reported and cannot mislead a resume.
TEST_F(Damage, LatestIsNotTrusted) {
  const fs::path path = run_.path() / "checkpoints" / "latest";
  const std::string good = read_file(path);
  std::vector<std::string> bad = {"", good.substr(0, good.size() / 2),
                                  good.substr(0, good.size() - 1), "../../etc/passwd\n"};
  for (size_t bit = 0; bit < good.size() * 8; ++bit) {
    bad.push_back(good);
    bad.back()[bit / 8] = static_cast<char>(good[bit / 8] ^ (1 << bit % 8));
  }
  for (const std::string& text : bad) {
    rewrite(path, text);
    std::vector<std::string> refused;
    ASSERT_EQ(open_newest(run_.path(), &refused)->manifest().step, 200);
    ASSERT_EQ(refused.size(), 1U) << text;
    ASSERT_NE(refused[0].find("latest"), std::string::npos);
    ASSERT_FALSE(verify_latest(run_.path()).empty());
  }
}

TEST_F(Damage, OtherFormatsAreRefused) {
  const std::string good = read_file(new_ / "manifest.json");
  const auto refusal = [&](const std::string& from, const std::string& to) {
    std::string body = good.substr(0, good.rfind(",\n\"sha256\""));
    body.replace(body.find(from), from.size(), to);
    const std::string text = body + ",\n\"sha256\": \"" + sha256_hex(body) + "\"\n}\n";
    return error_of(ExitCode::kNoCheckpoint, [&] { parse_manifest(text, "manifest.json"); });
  };
  EXPECT_NE(refusal("\"version\": 2", "\"version\": 3").find("version 3"), std::string::npos);
  EXPECT_NE(refusal("\"version\": 2", "\"version\": 0").find("version 0"), std::string::npos);
  EXPECT_NE(refusal("sbtrain checkpoint", "other").find("not an sbtrain"), std::string::npos);
  EXPECT_NE(refusal("\"step\": 200", "\"stop\": 200").find("step"), std::string::npos);
  EXPECT_NE(refusal("\"state.json\"", "\"../state.json\"").find("file name"), std::string::npos);
  EXPECT_NE(refusal("\"range\": [0, 407]", "\"range\": [0, 408]").find("range"), std::string::npos);
}

TEST(OpenCheckpoint, AFolderOfHuggingFaceIsToBeImported) {
  const TemporaryFolder folder;
  const auto refusal = [&] {
    return error_of(ExitCode::kNoCheckpoint, [&] { open_checkpoint(folder.path()); });
  };
  EXPECT_EQ(refusal().find("sbtrain import"), std::string::npos) << refusal();
  write_file(folder / "config.json", "{}");
  EXPECT_NE(refusal().find("sbtrain import"), std::string::npos) << refusal();
}

}  // namespace
}  // namespace sbtrain
