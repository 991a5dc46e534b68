#include "core/installation.h"

#include <gtest/gtest.h>

#include <fstream>

#include "core/cpu_level.h"
#include "core/shared_library.h"
#include "support/process.h"

namespace sbtrain {
namespace {

namespace fs = std::filesystem;

class Installation : public testing::Test {
 protected:
  Installation() {
    fs::create_directories(folder_ / "usr/share/sbtrain/configs");
    fs::create_directories(folder_ / "tree/configs");
  }

  test::TemporaryFolder temporary_;
  const fs::path& folder_ = temporary_.path();
};

TEST_F(Installation, FilesOfAnInstalledProgramAndOfABuild) {
  EXPECT_EQ(program_files(folder_ / "usr/bin/sbtrain"), folder_ / "usr/share/sbtrain");
  EXPECT_EQ(program_files(folder_ / "tree/build/release/sbtrain"), folder_ / "tree");
  EXPECT_EQ(program_files(folder_ / "tree/sbtrain"), "");
  EXPECT_EQ(program_files(folder_ / "other/bin/sbtrain"), "");
}

TEST_F(Installation, ConfigurationsAreThoseOfTheFolderFirst) {
  const fs::path before = fs::current_path();
  fs::current_path(folder_ / "tree");
  std::ofstream("configs/mine.yaml") << "name: mine\n";
  EXPECT_EQ(configuration_file("configs/mine.yaml"), "configs/mine.yaml");
  // There is none anywhere: the message is about the name that was given.
  EXPECT_EQ(configuration_file("configs/none.yaml"), "configs/none.yaml");
  fs::current_path(before);
}

TEST(CpuLevel, ThisProcessorRunsThisTest) {
  EXPECT_EQ(missing_cpu_feature(kCpuLevel), nullptr);
#if defined(__x86_64__)
  EXPECT_GE(kCpuLevel, 1);
#endif
}

TEST(SharedLibrary, SaysWhereItWasFoundAndWhyNot) {
  const FoundLibrary found = look_for("libm", [](FoundLibrary& library) {
    library.path = SharedLibrary("libm", {"libm.so.6"}, "install libc").path();
    library.version = "6";
  });
  EXPECT_EQ(found.problem, "");
  EXPECT_TRUE(fs::exists(found.path)) << found.path;
  const FoundLibrary missing = look_for("libnone", [](FoundLibrary& library) {
    library.version = "1";
    library.path = SharedLibrary("libnone", {"libnone.so.1"}, "install it").path();
  });
  EXPECT_EQ(missing.version, "");
  EXPECT_NE(missing.problem.find("install it"), std::string::npos) << missing.problem;
}

}  // namespace
}  // namespace sbtrain
