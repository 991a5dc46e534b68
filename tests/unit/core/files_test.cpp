#include "core/files.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <vector>

#include "support/process.h"

namespace sbtrain::test {
namespace {

namespace fs = std::filesystem;

ExitCode code_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.code();
  }
  return ExitCode::kDone;
}

TEST(Files, ReplacesWholeOrNotAtAll) {
  const TemporaryFolder folder;
  const fs::path path = folder / "below/file";
  replace_file(path, "old");
  EXPECT_EQ(read_file(path), "old");
  // Each operation fails once; the old content must stay, and no other file may be left.
  int operations = 0;
  replace_file(path, "old", [&](std::string_view, const fs::path&) { return ++operations, 0; });
  ASSERT_GE(operations, 4);
  for (int n = 0; n < operations; ++n) {
    int calls = 0;
    const IoHook fails = [&](std::string_view, const fs::path&) { return calls++ == n ? EIO : 0; };
    EXPECT_EQ(code_of([&] { replace_file(path, "new", fails); }), ExitCode::kStorage) << n;
    const bool renamed = n + 1 == operations;  // only the folder was left to flush
    EXPECT_EQ(read_file(path), renamed ? "new" : "old") << n;
    EXPECT_FALSE(fs::exists(folder / "below/file.tmp")) << n;
  }
}

// A mistyped path is no reason to make folders, least of all in the root.
TEST(Files, OnlyTheLastMissingFolderIsMade) {
  const TemporaryFolder folder;
  for (const fs::path& path : {folder / "no/such/file", fs::path("/no-such-folder/file")}) {
    EXPECT_EQ(code_of([&] { replace_file(path, "new"); }), ExitCode::kUsage) << path;
    EXPECT_EQ(code_of([&] { check_output(path, {}); }), ExitCode::kUsage) << path;
  }
  EXPECT_FALSE(fs::exists("/no-such-folder"));
  EXPECT_FALSE(fs::exists(folder / "no"));
  EXPECT_EQ(code_of([&] { check_output(folder / "last/file", {}); }), ExitCode::kDone);
  EXPECT_FALSE(fs::exists(folder / "last")) << "it is only looked at";
  replace_file(folder / "last/file", "new");
  EXPECT_EQ(read_file(folder / "last/file"), "new");
  replace_file(folder / "all/of/them", "new", {}, MissingFolders::kMakeAll);
  EXPECT_EQ(read_file(folder / "all/of/them"), "new");
}

TEST(Files, TwoWritersOfOneFileAreNotAllowed) {
  const TemporaryFolder folder;
  AtomicFile first(folder / "file");
  first.write("first");
  EXPECT_EQ(code_of([&] { AtomicFile second(folder / "file"); }), ExitCode::kUsage);
  first.commit();
  EXPECT_EQ(read_file(folder / "file"), "first");
}

TEST(Files, WhatAKilledWriterLeftIsReplacedAndNotWrittenInto) {
  const TemporaryFolder folder;
  write_file(folder / "mine", "mine");
  fs::create_hard_link(folder / "mine", folder / "file.tmp");
  replace_file(folder / "file", "new");
  EXPECT_EQ(read_file(folder / "mine"), "mine");
  EXPECT_EQ(read_file(folder / "file"), "new");
}

TEST(Files, OpensRegularFilesOnlyAndNeverWaits) {
  const TemporaryFolder folder;
  ASSERT_EQ(mkfifo((folder / "fifo").c_str(), 0600), 0);
  for (const fs::path& path :
       {folder / "fifo", folder.path(), fs::path("/dev/zero"), folder / "none"}) {
    EXPECT_EQ(code_of([&] { open_input(path, ExitCode::kData); }), ExitCode::kData) << path;
    EXPECT_EQ(code_of([&] { read_input(path, ExitCode::kConfig); }), ExitCode::kConfig) << path;
  }
  write_file(folder / "file", std::string(100000, 'x'));
  EXPECT_EQ(read_input(folder / "file", ExitCode::kData).size(), 100000U);
  EXPECT_EQ(code_of([&] { read_input(folder / "file", ExitCode::kData, "", 99999); }),
            ExitCode::kData);
}

TEST(Files, SettingAsideOverwritesNothing) {
  const TemporaryFolder folder;
  for (const char* text : {"1", "2", "3"}) {
    write_file(folder / "file", text);
    set_aside(folder / "file");
  }
  EXPECT_EQ(read_file(folder / "file.old"), "1");
  EXPECT_EQ(read_file(folder / "file.old.2"), "2");
  EXPECT_EQ(read_file(folder / "file.old.3"), "3");
  EXPECT_FALSE(fs::exists(folder / "file"));
}

TEST(Files, AScratchFileHasNoName) {
  const TemporaryFolder folder;
  const FileDescriptor fd = open_scratch(folder.path());
  write_at(fd.get(), "scratch", 3, "abc", 3);
  EXPECT_TRUE(fs::is_empty(folder.path()));
  char text[3] = {};
  EXPECT_EQ(::pread(fd.get(), text, 3, 3), 3);
  EXPECT_EQ(std::string(text, 3), "abc");
}

}  // namespace
}  // namespace sbtrain::test
