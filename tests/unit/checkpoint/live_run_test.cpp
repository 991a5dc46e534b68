// Reading the checkpoints of a run that saves, and removes old ones, all the time.

#include <atomic>
#include <thread>

#include "core/log.h"
#include "fixtures.h"

namespace sbtrain {
namespace {

namespace fs = std::filesystem;
using namespace sbtrain::test;  // NOLINT

// Saves `saves` steps and keeps one, while `read` is called again and again.
template <typename Read>
void read_beside_saves(const fs::path& run, int saves, const Read& read) {
  save_step(run, 1, 1);
  std::atomic<bool> done{false};
  std::thread writer([&] {
    for (int step = 2; step <= saves; ++step) save_step(run, step, 1);
    done = true;
  });
  while (!done && !testing::Test::HasFailure()) read();
  writer.join();
}

TEST(LiveRun, EveryListIsThatOfSomeMoment) {
  use_memory_for_temporary_folders();
  const TemporaryFolder run;
  int64_t newest = 0;
  read_beside_saves(run.path(), 500, [&] {
    const std::vector<CheckpointInfo> list = list_checkpoints(run.path());
    ASSERT_FALSE(list.empty());
    for (const CheckpointInfo& info : list) ASSERT_EQ(info.problem, "") << info.folder;
    ASSERT_GE(list.front().step, newest);
    newest = list.front().step;
    ASSERT_EQ(verify_latest(run.path()), "");
  });
}

TEST(LiveRun, TheNewestIsFoundAndGood) {
  use_memory_for_temporary_folders();
  const LogLevel level = log_level();
  set_log_level(LogLevel::kError);  // each one that is passed over is a warning
  const TemporaryFolder run;
  int64_t newest = 0;
  read_beside_saves(run.path(), 200, [&] {
    std::vector<std::string> refused;
    const auto reader = open_newest(run.path(), &refused);
    ASSERT_TRUE(reader.has_value());
    EXPECT_TRUE(refused.empty()) << refused.front();
    ASSERT_GE(reader->manifest().step, newest);
    newest = reader->manifest().step;
    // Its text was read when it was opened; its data may be gone by now.
    EXPECT_EQ(reader->state_json(), test_snapshot(newest).state_json);
  });
  set_log_level(level);
}

}  // namespace
}  // namespace sbtrain
