// Which Python is run, and whose.
#include "core/python.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <map>

#include "support/process.h"

namespace sbtrain::test {
namespace {

namespace fs = std::filesystem;

// Makes a virtual environment, as far as one is looked at.
std::string make_environment(const fs::path& folder) {
  const fs::path python = folder / "bin/python3";
  fs::create_directories(python.parent_path());
  write_file(python, "#!/bin/sh\nexit 0\n");
  fs::permissions(python, fs::perms::owner_all);
  return python.string();
}

// The program of a source tree below the folder.
std::string make_program(const fs::path& folder, const std::string& name) {
  fs::create_directories((folder / name).parent_path());
  write_file(folder / name, "");
  return (folder / name).string();
}

TEST(Python, IsThatOfTheTreeOrTheInstallationOfTheProgram) {
  const TemporaryFolder folder;
  const std::string own = make_environment(folder / "tree/.venv");
  EXPECT_EQ(own_python(make_program(folder / "tree", "build/release/sbtrain")), own);
  EXPECT_EQ(own_python(make_program(folder / "tree", "bin/sbtrain")), own);
  // Not in every folder above: whoever may write to one of them would run programs as the user.
  EXPECT_EQ(own_python(make_program(folder / "tree", "sub/build/release/sbtrain")), "");
  EXPECT_EQ(own_python(make_program(folder / "tree", "sub/bin/sbtrain")), "");
  EXPECT_EQ(own_python(make_program(folder / "tree", "opt/sbtrain")), "");
}

TEST(Python, IsNotRunWhereOthersMayWriteToIt) {
  for (const char* part : {".venv", ".venv/bin", ".venv/bin/python3"}) {
    const TemporaryFolder folder;
    const std::string own = make_environment(folder / ".venv");
    const std::string program = make_program(folder.path(), "build/release/sbtrain");
    ASSERT_EQ(own_python(program), own);
    fs::permissions(folder / part, fs::perms::others_write, fs::perm_options::add);
    EXPECT_EQ(own_python(program), "") << part;
  }
}

TEST(Python, IsNotRunWhereItBelongsToSomebodyElse) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give files away";
  constexpr uid_t kOther = 12345;
  for (const char* part : {".venv", ".venv/bin", ".venv/bin/python3"}) {
    const TemporaryFolder folder;
    const std::string own = make_environment(folder / ".venv");
    const std::string program = make_program(folder.path(), "build/release/sbtrain");
    ASSERT_EQ(::lchown((folder / part).c_str(), kOther, kOther), 0);
    EXPECT_EQ(own_python(program), "") << part;
    ASSERT_EQ(::chown(program.c_str(), kOther, kOther), 0);
    EXPECT_EQ(own_python(program), own) << part << ": of the owner of the program";
  }
  // A link of somebody else, to what may be run.
  const TemporaryFolder folder;
  const std::string own = make_environment(folder / ".venv");
  fs::rename(own, own + ".real");
  fs::create_symlink(own + ".real", own);
  const std::string program = make_program(folder.path(), "build/release/sbtrain");
  EXPECT_EQ(own_python(program), own);
  ASSERT_EQ(::lchown(own.c_str(), kOther, kOther), 0);
  EXPECT_EQ(own_python(program), "");
}

// The program and the scripts agree, but for the environment of their own tree.
TEST(Python, IsChosenByTheEnvironment) {
  const TemporaryFolder folder;
  const std::string active = make_environment(folder / "active");
  const std::string in_path = make_environment(folder / "path");
  const std::string tree = make_environment(folder / "tree/.venv");
  fs::create_directories(folder / "tree/scripts");
  fs::copy(fs::path(SBTRAIN_SOURCE) / "scripts/python.sh", folder / "tree/scripts");
  const std::string path = (folder / "path/bin").string() + ":" + std::getenv("PATH");
  const auto chosen_by = [&](const std::string& given, const std::string& environment,
                             const std::string& script) {
    const fs::path log = folder / "log";
    Process process({"env", "-u", "SBTRAIN_PYTHON", "-u", "VIRTUAL_ENV", "PATH=" + path,
                     "SBTRAIN_PYTHON=" + given, "VIRTUAL_ENV=" + environment, "bash", script},
                    log);
    EXPECT_EQ(process.wait(), 0) << read_file(log);
    return read_file(log);
  };
  const std::string script = (folder / "tree/scripts/python.sh").string();
  EXPECT_EQ(chosen_by("/bin/true", (folder / "active").string(), script), "/bin/true\n");
  EXPECT_EQ(chosen_by("", (folder / "active").string(), script), active + "\n");
  EXPECT_EQ(chosen_by("", "", script), tree + "\n");
  fs::remove_all(folder / "tree/.venv");
  EXPECT_EQ(chosen_by("", "", script), in_path + "\n");

  ::setenv("SBTRAIN_PYTHON", "/bin/true", 1);
  ::setenv("VIRTUAL_ENV", (folder / "active").c_str(), 1);
  EXPECT_EQ(python_interpreter(), "/bin/true");
  ::unsetenv("SBTRAIN_PYTHON");
  EXPECT_EQ(python_interpreter(), active);
  ::setenv("VIRTUAL_ENV", (folder / "none").c_str(), 1);
  EXPECT_NE(python_interpreter(), "/usr/bin/python3") << "that of the search path comes before";
  ::unsetenv("VIRTUAL_ENV");
}

}  // namespace
}  // namespace sbtrain::test
