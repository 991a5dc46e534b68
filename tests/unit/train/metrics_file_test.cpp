#include "train/metrics_file.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>

#include "core/error.h"
#include "support/process.h"

namespace sbtrain::test {
namespace {

TEST(AppendFile, GoesOnWhereTheFileEnds) {
  const TemporaryFolder folder;
  const std::string path = folder / "file";
  AppendFile(path, AppendFile::Mode::kAppend).append("one\n");
  AppendFile(path, AppendFile::Mode::kAppend).append("two\n");
  EXPECT_EQ(read_file(path), "one\ntwo\n");
  EXPECT_THROW(AppendFile(path, AppendFile::Mode::kCreate), Error);
}

TEST(AppendFile, ErrorsNameTheFileAndTheReason) {
  try {
    AppendFile("/dev/full", AppendFile::Mode::kAppend).append("x");
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kStorage);
    EXPECT_NE(std::string(error.what()).find("/dev/full: cannot write: No space left"),
              std::string::npos);
  }
  EXPECT_THROW(AppendFile("/nonexistent/file", AppendFile::Mode::kAppend), Error);
}

TEST(AppendFile, ARecordThatDoesNotFitIsCutOffAgain) {
  const TemporaryFolder folder;
  const std::string path = folder / "file";
  AppendFile file(path, AppendFile::Mode::kAppend);
  file.append("whole\n");
  const auto before_signal = std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit tight{10, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &tight);
  EXPECT_THROW(file.append("too long for ten bytes\n"), Error);
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, before_signal);
  file.append("next\n");
  EXPECT_EQ(read_file(path), "whole\nnext\n");
}

}  // namespace
}  // namespace sbtrain::test
