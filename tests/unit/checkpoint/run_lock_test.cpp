#include "checkpoint/run_lock.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "fixtures.h"

namespace sbtrain {
namespace {

using namespace sbtrain::test;  // NOLINT
namespace fs = std::filesystem;

TEST(RunLock, SecondJobIsRefusedByName) {
  TemporaryFolder folder;
  char host[256] = {};
  gethostname(host, sizeof(host) - 1);
  {
    const RunLock lock(folder / "run");
    const std::string message =
        error_of(ExitCode::kUsage, [&] { const RunLock second(folder / "run"); });
    EXPECT_NE(message.find(fmt::format("pid {} on host {}", getpid(), host)), std::string::npos)
        << message;
    EXPECT_NE(message.find((folder / "run").string()), std::string::npos);
    const RunLock other(folder / "other");
  }
  const RunLock again(folder / "run");
}

TEST(RunLock, AKilledHolderLeavesNoLock) {
  TemporaryFolder folder;
  int pipe_ends[2];
  ASSERT_EQ(pipe(pipe_ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    const RunLock lock(folder.path());
    if (write(pipe_ends[1], "x", 1) != 1) _exit(1);
    pause();
    _exit(0);
  }
  char ready = 0;
  ASSERT_EQ(read(pipe_ends[0], &ready, 1), 1);
  const std::string message = error_of(ExitCode::kUsage, [&] { const RunLock l(folder.path()); });
  EXPECT_NE(message.find(fmt::format("pid {}", child)), std::string::npos) << message;
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  close(pipe_ends[0]);
  close(pipe_ends[1]);
  const RunLock lock(folder.path());
}

TEST(RunLock, NoticesThatTheFolderIsGone) {
  TemporaryFolder folder;
  for (const bool replaced : {false, true}) {
    const RunLock lock(folder / "run");
    lock.check();
    fs::rename(folder / "run", folder / "moved");
    if (replaced) const RunLock second(folder / "run");
    const std::string message = error_of(ExitCode::kStorage, [&] { lock.check(); });
    EXPECT_NE(message.find((folder / "run").string()), std::string::npos) << message;
    EXPECT_EQ(fs::exists(folder / "run"), replaced);
    fs::remove_all(folder / "run");
    fs::rename(folder / "moved", folder / "run");
    lock.check();  // it is back
  }
}

}  // namespace
}  // namespace sbtrain
