// train.precision: auto. What it times needs a GPU (tests/gpu/model_test.cpp); here is what it
// keeps.
#include "train/precision_choice.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "core/error.h"
#include "core/files.h"
#include "support/optimizer_runs.h"
#include "support/process.h"

namespace sbtrain::test {
namespace {

TEST(PrecisionChoice, IsKeptInTheRunFolder) {
  const TemporaryFolder folder;
  const std::filesystem::path file = std::filesystem::path(folder.path()) / "precision.json";
  const auto alone = make_single_process();
  const Config config = optimizer_config("precision: auto");
  const auto keep = [&](bool writes) {
    return keep_precision(config, Backend::kCpu, *alone, file, writes);
  };
  EXPECT_EQ(keep(/*writes=*/false).precision, Precision::kBf16);
  EXPECT_FALSE(std::filesystem::exists(file));
  const PrecisionChoice first = keep(/*writes=*/true);
  EXPECT_EQ(first.precision, Precision::kBf16);
  EXPECT_EQ(first.reason, "without a GPU fp8 is only emulated");
  EXPECT_EQ(keep(/*writes=*/true).reason, first.reason);

  // A run that began on a GPU goes on as it was.
  replace_file(file, R"({"precision": "fp8", "reason": "faster"})", {}, MissingFolders::kError);
  EXPECT_EQ(keep(/*writes=*/true).precision, Precision::kFp8);
  EXPECT_EQ(keep(/*writes=*/true).reason, "faster");
}

TEST(PrecisionChoice, RefusesAFileThatHoldsNone) {
  const TemporaryFolder folder;
  const std::filesystem::path file = std::filesystem::path(folder.path()) / "precision.json";
  const auto alone = make_single_process();
  for (const char* text :
       {"{", "[]", "{}", R"({"precision": "fp4"})", R"({"precision": "auto"})"}) {
    replace_file(file, text, {}, MissingFolders::kError);
    try {
      keep_precision(optimizer_config("precision: auto"), Backend::kCpu, *alone, file, true);
      FAIL() << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kStorage);
      EXPECT_NE(std::string(error.what()).find(file.string()), std::string::npos);
    }
  }
}

}  // namespace
}  // namespace sbtrain::test
