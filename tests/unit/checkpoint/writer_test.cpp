#include <gtest/gtest.h>
#include <sys/resource.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <future>

#include "checkpoint/checkpoint_writer.h"
#include "fixtures.h"

namespace sbtrain {
namespace {

namespace fs = std::filesystem;
using namespace sbtrain::test;  // NOLINT

TEST(CheckpointWriter, SavesInTheBackgroundAndReusesBuffers) {
  TemporaryFolder run;
  std::promise<void> gate;
  const std::shared_future<void> opened = gate.get_future().share();
  CheckpointWriter writer(
      {.run = run.path(), .keep = 2, .io_hook = [opened](std::string_view, const fs::path&) {
         opened.wait();
         return 0;
       }});
  writer.save(test_snapshot(1));  // returns although the save cannot proceed
  EXPECT_TRUE(writer.busy());
  writer.poll();
  EXPECT_EQ(writer.last().step, -1);
  gate.set_value();
  EXPECT_TRUE(writer.wait());
  EXPECT_FALSE(writer.busy());
  EXPECT_EQ(writer.last().step, 1);
  EXPECT_GT(writer.last().bytes, 0U);
  expect_content(*open_newest(run.path()), 1);

  const Snapshot again = writer.take_buffers();
  EXPECT_EQ(again.tensors.size(), test_snapshot(1).tensors.size());
  EXPECT_TRUE(writer.take_buffers().tensors.empty());
}

TEST(CheckpointWriter, OneSaveAtATime) {
  TemporaryFolder run;
  std::atomic<bool> overlap = false;
  std::atomic<int> shards = 0;
  CheckpointWriter writer({.run = run.path(),
                           .keep = 2,
                           .io_hook = [&](std::string_view operation, const fs::path& path) {
                             if (operation == "create" && path.extension() == ".safetensors") {
                               overlap = overlap || ++shards > 1;
                             }
                             if (operation == "create" && path.filename() == "latest.tmp") --shards;
                             return 0;
                           }});
  for (int64_t step = 1; step <= 6; ++step) writer.save(test_snapshot(step));
  EXPECT_TRUE(writer.wait());
  EXPECT_FALSE(overlap);
  expect_content(*open_newest(run.path()), 6);
  EXPECT_EQ(list_checkpoints(run.path()).size(), 2U);
}

TEST(CheckpointWriter, SynchronousSave) {
  TemporaryFolder run;
  CheckpointWriter writer({.run = run.path(), .async = false});
  writer.save(test_snapshot(4));
  EXPECT_EQ(writer.last().step, 4);
  expect_content(*open_newest(run.path()), 4);
}

TEST(CheckpointWriter, DestructorFinishesTheSave) {
  TemporaryFolder run;
  { CheckpointWriter({.run = run.path()}).save(test_snapshot(4)); }
  expect_content(*open_newest(run.path()), 4);
}

// For every n, the n-th operation and all after it fail; the old checkpoint must stay complete.
TEST(CheckpointWriter, AnyFailingOperationLeavesTheOldCheckpoint) {
  use_memory_for_temporary_folders();
  constexpr int kErrors[] = {ENOSPC, EIO, EROFS};
  bool saved = false;
  for (int n = 0; !saved; ++n) {
    ASSERT_LT(n, 1000);
    TemporaryFolder run;
    save_step(run.path(), 1);
    save_step(run.path(), 2);
    int calls = 0;
    std::atomic<bool> armed = false;
    CheckpointWriter writer({.run = run.path(),
                             .keep = 2,
                             .async = n % 2 == 0,
                             .io_hook = [&](std::string_view operation, const fs::path&) {
                               // Removing works on a full disk.
                               const bool fails = armed && operation != "remove" && calls++ >= n;
                               return fails ? kErrors[n % 3] : 0;
                             }});
    armed = true;
    writer.save(test_snapshot(3));
    saved = writer.wait();
    armed = false;
    for (const std::string& name : folder_names(run.path() / "checkpoints")) {
      EXPECT_EQ(name.find(".tmp"), std::string::npos) << name << " is left, operation " << n;
    }
    const auto reader = open_newest(run.path());
    ASSERT_TRUE(reader);
    expect_content(*reader, reader->manifest().step);
    if (saved) {
      EXPECT_EQ(reader->manifest().step, 3);
      continue;
    }
    EXPECT_TRUE(reader->manifest().step == 2 || reader->manifest().step == 3);
    const std::string& error = writer.last().error;
    EXPECT_NE(error.find(run.path().string()), std::string::npos) << error;
    writer.save(test_snapshot(4));  // the disk works again
    EXPECT_TRUE(writer.wait());
    expect_content(*open_newest(run.path()), 4);
  }
}

TEST(CheckpointWriter, GivesUpAfterFailuresInARow) {
  TemporaryFolder run;
  bool full = false;
  CheckpointWriter writer({.run = run.path(),
                           .max_failures = 3,
                           .io_hook = [&](std::string_view operation, const fs::path&) {
                             return full && operation == "write" ? ENOSPC : 0;
                           }});
  const auto save = [&](int64_t step, bool fails) {
    full = fails;
    writer.save(test_snapshot(step));
    return writer.wait();
  };
  EXPECT_TRUE(save(1, false));
  EXPECT_FALSE(save(2, true));
  EXPECT_FALSE(save(3, true));
  EXPECT_TRUE(save(4, false));  // the count starts again
  EXPECT_FALSE(save(5, true));
  EXPECT_FALSE(save(6, true));
  const std::string message = error_of(ExitCode::kStorage, [&] { save(7, true); });
  EXPECT_NE(message.find("No space left on device"), std::string::npos) << message;
  expect_content(*open_newest(run.path()), 4);
}

TEST(CheckpointWriter, ALostRankIsNotAStorageError) {
  TemporaryFolder run;
  const RankGroup group{0, 2, [](const std::string&) -> std::vector<std::string> {
                          fail(ExitCode::kCommunication, "rank 1 is gone");
                        }};
  CheckpointWriter writer({.run = run.path(), .group = group});
  writer.save(test_snapshot(1, 0, 2));
  error_of(ExitCode::kCommunication, [&] { writer.wait(); });
}

// A real write error: files may not grow beyond 200 kB.
TEST(CheckpointWriter, RealWriteErrors) {
  TemporaryFolder run;
  save_step(run.path(), 1);
  Snapshot big = test_snapshot(2);
  std::vector<TestShard> shards = test_shards(2);
  shards.push_back({{kModelKind, "big", {100000}, 0, 100000}, std::vector<float>(100000)});
  set_tensors(big, std::move(shards));
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit limit{};
  getrlimit(RLIMIT_FSIZE, &limit);
  rlimit small = limit;
  small.rlim_cur = 200000;
  setrlimit(RLIMIT_FSIZE, &small);
  std::string message;
  try {
    save_checkpoint(Storage(), run.path(), big, RankGroup{}, 1);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kStorage);
    message = error.what();
  }
  setrlimit(RLIMIT_FSIZE, &limit);
  EXPECT_NE(message.find("File too large"), std::string::npos) << message;
  EXPECT_EQ(folder_names(run.path() / "checkpoints"),
            (std::vector<std::string>{"latest", "step-00000001"}));
  expect_content(*open_newest(run.path()), 1);
}

TEST(CheckpointWriter, AFolderThatCannotBeMade) {
  TemporaryFolder run;
  write_file(run / "checkpoints", "a file is in the way");
  const std::string message = error_of(ExitCode::kStorage, [&] { save_step(run.path(), 1); });
  EXPECT_NE(message.find("checkpoints"), std::string::npos) << message;
}

}  // namespace
}  // namespace sbtrain
