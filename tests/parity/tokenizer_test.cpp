// Tokenizers against the libraries they come from, on 10000 hostile texts for each kind. Skipped if
// the Python interpreter of scripts/python.sh has no tokenizers and tiktoken.
#include "support/expected_tokens.h"
#include "support/process.h"

namespace sbtrain::test {
namespace {

constexpr int kNoLibraries = 77;  // exit code of tokenizer_reference.py without them
constexpr int kTexts = 10000;

TEST(TokenizerParity, GivesTheTokensOfTheOriginals) {
  const TemporaryFolder folder;
  const std::string source = SBTRAIN_SOURCE;
  Process process({"bash", "-c", "exec \"$(\"$1/scripts/python.sh\")\" \"${@:2}\"", "bash", source,
                   source + "/tests/unit/data/tokenizer_reference.py", "families",
                   folder / "families", "--count", std::to_string(kTexts)},
                  folder / "log");
  const int code = process.wait(800);
  if (code == kNoLibraries) GTEST_SKIP() << process.output();
  ASSERT_EQ(code, 0) << process.output();
  int families = 0;
  for (const auto& family : std::filesystem::directory_iterator(folder / "families")) {
    EXPECT_EQ(expect_tokens(family.path()), kTexts) << family.path();
    ++families;
  }
  EXPECT_EQ(families, 9);
}

}  // namespace
}  // namespace sbtrain::test
