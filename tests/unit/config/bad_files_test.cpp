// Every bad/NAME.yaml must be refused with exactly the message in bad/NAME.expected.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "config/schema.h"
#include "core/error.h"

namespace sbtrain {
namespace {

namespace fs = std::filesystem;

const fs::path kFolder = fs::path(SBTRAIN_SOURCE) / "tests/unit/config/bad";

std::vector<std::string> bad_files() {
  std::vector<std::string> names;
  for (const fs::directory_entry& entry : fs::directory_iterator(kFolder)) {
    if (entry.path().extension() == ".yaml") names.push_back(entry.path().stem());
  }
  std::sort(names.begin(), names.end());
  return names;
}

class BadFile : public testing::TestWithParam<std::string> {};

TEST_P(BadFile, IsRefusedWithTheExpectedMessage) {
  std::ifstream file(kFolder / (GetParam() + ".expected"));
  std::stringstream expected;
  expected << file.rdbuf();
  fs::current_path(kFolder);  // messages show paths as they were given
  try {
    load_config(GetParam() + ".yaml");
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kConfig);
    EXPECT_EQ(error.what() + std::string("\n"), expected.str());
  }
}

INSTANTIATE_TEST_SUITE_P(Table, BadFile, testing::ValuesIn(bad_files()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace sbtrain
