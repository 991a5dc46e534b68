#include "job/supervisor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "support/process.h"

namespace sbtrain::test {
namespace {

namespace fs = std::filesystem;

class Supervisor : public testing::Test {
 protected:
  // Starts the program supervised.cpp.
  Process start(int ranks, const std::vector<std::string>& behaviour, int grace_ms = 20000) const {
    std::vector<std::string> command = {SUPERVISED_PROGRAM, std::to_string(ranks),
                                        std::to_string(grace_ms), folder_.path().string()};
    command.insert(command.end(), behaviour.begin(), behaviour.end());
    return {command, log()};
  }
  int run(int ranks, const std::vector<std::string>& behaviour, int grace_ms = 20000) const {
    Process process = start(ranks, behaviour, grace_ms);
    return process.wait(60);
  }
  fs::path log() const { return folder_ / "log"; }
  std::string output() const { return read_file(log()); }

  int occurrences(const std::string& text) const {
    const std::string all = output();
    int count = 0;
    for (size_t at = all.find(text); at != std::string::npos; at = all.find(text, at + 1)) ++count;
    return count;
  }

  // Waits until each rank has written the file.
  void wait_for(const std::string& name, int ranks) const {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    for (int rank = 0; rank < ranks; ++rank) {
      const fs::path file = folder_ / fmt::format("{}-{}", name, rank);
      while (!fs::exists(file)) {
        ASSERT_LT(std::chrono::steady_clock::now(), deadline) << file << "\n" << output();
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
    }
  }
  pid_t pid(int rank) const { return std::stoi(read_file(folder_ / fmt::format("pid-{}", rank))); }
  static bool alive(pid_t pid) {
    const std::string state = read_file(fmt::format("/proc/{}/stat", pid));
    return !state.empty() && state.find(") Z ") == std::string::npos;
  }
  static void expect_gone(const std::vector<pid_t>& pids) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (std::ranges::any_of(pids, alive) && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    for (const pid_t pid : pids) EXPECT_FALSE(alive(pid)) << pid;
  }

  TemporaryFolder folder_;
};

TEST_F(Supervisor, RanksHaveTheirOutputAndNoInput) {
  EXPECT_EQ(run(3, {"report"}), 0) << output();
  EXPECT_EQ(occurrences("out of rank 0\n"), 1);
  EXPECT_EQ(occurrences("rank 0: "), 0);
  EXPECT_EQ(occurrences("rank 2: out of rank 2\n"), 1);
  EXPECT_EQ(occurrences("rank 2: error of rank 2 of 3 at port some, unfinished\n"), 1);
}

TEST_F(Supervisor, ReturnsTheCodeOfTheFailure) {
  EXPECT_EQ(run(3, {"exit", "2", "4"}), 4);
  EXPECT_EQ(run(3, {"exit", "0", "9"}), 9);
  EXPECT_EQ(run(2, {"exit all", "0"}), 0);
  EXPECT_EQ(run(2, {"exit all", "85"}), 85);
  EXPECT_EQ(run(2, {"exit all", "3"}), 3);
}

TEST_F(Supervisor, AFailureIsShownOnce) {
  for (const char* failing : {"0", "1"}) {
    EXPECT_EQ(run(3, {"control", failing}), 4);
    EXPECT_EQ(occurrences("bad block"), 1) << output();
    EXPECT_EQ(occurrences("error: "), 1) << output();
  }
  EXPECT_EQ(occurrences("error: rank 1: bad block"), 1) << output();
}

TEST_F(Supervisor, ARankThatDoesNotEndIsKilled) {
  EXPECT_EQ(run(3, {"fail and hang", "1", "4"}, 300), 4);
  EXPECT_EQ(occurrences("rank 1: error: something specific"), 1) << output();
  EXPECT_EQ(occurrences("ranks 0, 2 did not end within 0.3 s after another rank had: killed"), 1)
      << output();
  expect_gone({pid(0), pid(2)});
}

TEST_F(Supervisor, AKilledRankIsNamed) {
  EXPECT_EQ(run(3, {"kill", "2", std::to_string(SIGKILL)}, 300), 7);
  EXPECT_EQ(occurrences(fmt::format("rank 2 (pid {}) was killed by signal 9", pid(2))), 1)
      << output();
  expect_gone({pid(0), pid(1)});
}

// Rank 0 leads the job. Continued, it would tell that the others are gone.
TEST_F(Supervisor, ARankThatIsStoppedIsKilledWhenTheOthersHaveFailed) {
  for (const int stopped : {0, 1}) {
    EXPECT_EQ(run(3, {"stop", std::to_string(stopped)}), 7);
    EXPECT_EQ(occurrences("error: "), 1) << output();
    EXPECT_EQ(
        occurrences(fmt::format("rank {} (pid {}) was stopped: killed", stopped, pid(stopped))), 1)
        << output();
  }
}

TEST_F(Supervisor, PassesSignalsOnOnce) {
  Process process = start(3, {"count"});
  wait_for("ready", 3);
  for (const int signal : {SIGUSR1, SIGUSR2, SIGINT, SIGTERM}) {
    process.signal(signal);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  EXPECT_EQ(process.wait(60), 85) << output();
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(read_file(folder_ / fmt::format("counts-{}", rank)), "1 1 1 1") << rank;
  }
}

// Before a rank has handlers, a signal ends it, and with it the program, as without a supervisor.
TEST_F(Supervisor, EndsByTheSignalThatEndsItsRanks) {
  Process process = start(2, {"sleep"});
  wait_for("pid", 2);
  process.signal(SIGTERM);
  EXPECT_EQ(process.wait(60), 128 + SIGTERM);
  EXPECT_EQ(occurrences("killed"), 0) << output();
  expect_gone({pid(0), pid(1)});
}

// A program may hold back signals until it has handlers for them, and its ranks then do so too.
TEST_F(Supervisor, TakesSignalsThatItsCallerHasBlocked) {
  sigset_t stop;
  sigset_t before;
  sigemptyset(&stop);
  sigaddset(&stop, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &stop, &before);
  Process process = start(2, {"held"});
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  wait_for("pid", 2);
  process.signal(SIGTERM);
  EXPECT_EQ(process.wait(60), 85) << output();
}

TEST_F(Supervisor, LeavesNoOrphans) {
  Process process = start(3, {"sleep"});
  wait_for("pid", 3);
  process.signal(SIGKILL);
  process.wait(60);
  expect_gone({pid(0), pid(1), pid(2)});
}

}  // namespace
}  // namespace sbtrain::test
