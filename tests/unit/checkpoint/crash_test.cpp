// Kills the process while it saves. The disk must then hold the complete old or new checkpoint.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <sstream>

#include "checkpoint/checkpoint_writer.h"
#include "fixtures.h"

namespace sbtrain {
namespace {

namespace fs = std::filesystem;
using namespace sbtrain::test;  // NOLINT

constexpr const char* kFolderVariable = "SBTRAIN_CRASH_TEST_FOLDER";

// Runs `body` in a forked process that is killed in its n-th file operation. Returns true if it was
// killed, false if it finished before.
bool killed_at(int n, int exchange_error, const std::function<void(const Storage&)>& body) {
  const pid_t child = fork();
  if (child == 0) {
    int calls = 0;
    const Storage storage([&](std::string_view operation, const fs::path&) {
      if (calls++ == n) kill(getpid(), SIGKILL);
      return operation == "exchange" ? exchange_error : 0;
    });
    body(storage);
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status) || WEXITSTATUS(status) == 0);
  return WIFSIGNALED(status);
}

void expect_usable(const fs::path& run, int64_t old_step, int64_t new_step) {
  const auto check = [&] {
    std::vector<std::string> refused;
    const auto reader = open_newest(run, &refused);
    EXPECT_TRUE(refused.empty()) << refused[0];
    ASSERT_EQ(reader.has_value(), old_step > 0 || reader.has_value());
    if (!reader) return;
    EXPECT_TRUE(reader->manifest().step == old_step || reader->manifest().step == new_step);
    expect_content(*reader, reader->manifest().step);
  };
  check();
  clean_up_checkpoints(Storage(), run);
  check();
  for (const std::string& name : folder_names(run / "checkpoints")) {
    EXPECT_TRUE(name == "latest" || name.find('.') == std::string::npos) << name;
  }
}

TEST(Crash, AtEveryOperationOfASave) {
  use_memory_for_temporary_folders();
  struct Case {
    int64_t old_step;  // 0: none
    int64_t new_step;
    int exchange_error;
  };
  for (const Case& c : {Case{0, 1, 0}, Case{1, 2, 0}, Case{1, 1, 0}, Case{1, 1, EINVAL}}) {
    bool killed = true;
    for (int n = 0; killed; ++n) {
      ASSERT_LT(n, 1000);
      TemporaryFolder run;
      fs::create_directories(run.path() / "checkpoints");
      if (c.old_step > 0) save_step(run.path(), c.old_step);
      killed = killed_at(n, c.exchange_error, [&](const Storage& storage) {
        save_step(run.path(), c.new_step, 1, storage);
      });
      expect_usable(run.path(), c.old_step, c.new_step);
      if (const std::optional<CheckpointReader> newest = open_newest(run.path())) {
        clean_up_checkpoints(Storage(), run.path());
        EXPECT_EQ(latest_text(run.path()), newest->folder().filename().string() + "\n");
      }
      save_step(run.path(), 3, 1);  // a later save works
      expect_content(*open_newest(run.path()), 3);
      if (HasFailure()) FAIL() << "killed at operation " << n << " of saving " << c.new_step;
    }
  }
}

TEST(Crash, AtEveryOperationOfCleaningUp) {
  use_memory_for_temporary_folders();
  bool killed = true;
  for (int n = 0; killed; ++n) {
    TemporaryFolder run;
    save_step(run.path(), 1);
    save_step(run.path(), 2);
    const fs::path parent = run.path() / "checkpoints";
    fs::rename(parent / "step-00000002", parent / "step-00000002.old");
    fs::copy(parent / "step-00000001", parent / "step-00000002.tmp", fs::copy_options::recursive);
    killed =
        killed_at(n, 0, [&](const Storage& storage) { clean_up_checkpoints(storage, run.path()); });
    expect_usable(run.path(), 2, 2);
  }
}

// Runs in a process of its own, which the next test starts and kills.
TEST(Crash, DISABLED_SaveForever) {
  const char* folder = std::getenv(kFolderVariable);
  ASSERT_NE(folder, nullptr);
  CheckpointWriter writer({.run = folder, .keep = 2});
  const auto newest = open_newest(folder);
  std::printf("\nsaving\n");
  std::fflush(stdout);
  for (int64_t step = newest ? newest->manifest().step + 1 : 1;; ++step) {
    writer.save(test_snapshot(step));
    if (step % 3 == 0) {
      ASSERT_TRUE(writer.wait());
      std::printf("\nsaved %lld\n", static_cast<long long>(step));
      std::fflush(stdout);
    }
  }
}

int64_t last_reported(const std::string& output) {
  std::istringstream lines(output);
  int64_t last = 0;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("saved ")) last = std::stoll(line.substr(6));
  }
  return last;
}

TEST(Crash, KilledAtRandomMoments) {
  TemporaryFolder folder;
  const fs::path run = folder / "run";
  fs::create_directory(run);  // as the holder of its lock would
  std::mt19937 random(11);
  int64_t newest = 0;
  for (int round = 0; round < 25; ++round) {
    Process child({"/proc/self/exe", "--gtest_filter=Crash.DISABLED_SaveForever",
                   "--gtest_also_run_disabled_tests"},
                  folder / "log", {{kFolderVariable, run.string()}});
    const auto saving = [&] { return child.output().find("saving") != std::string::npos; };
    for (int i = 0; i < 20000 && !saving(); ++i) usleep(1000);
    usleep(random() % 150000);
    ASSERT_TRUE(child.running()) << child.output();
    child.signal(SIGKILL);
    ASSERT_EQ(child.wait(), 128 + SIGKILL) << child.output();
    newest = std::max(newest, last_reported(child.output()));

    std::vector<std::string> refused;
    const auto reader = open_newest(run, &refused);
    EXPECT_TRUE(refused.empty()) << refused[0];
    if (!reader) {
      EXPECT_EQ(newest, 0);
      continue;
    }
    EXPECT_GE(reader->manifest().step, newest) << "a finished save was lost";
    newest = reader->manifest().step;
    expect_content(*reader, newest);
    if (HasFailure()) FAIL() << "round " << round;
  }
  EXPECT_GT(newest, 8) << "the child hardly saved anything";
}

}  // namespace
}  // namespace sbtrain
