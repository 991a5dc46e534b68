// Tokenizers against the libraries they come from, on 10000 hostile texts for each kind. Skipped if
// the Python interpreter of scripts/python.sh has no tokenizers and tiktoken.
#include <fstream>

#include "support/expected_tokens.h"
#include "support/process.h"

namespace sbtrain::test {
namespace {

constexpr int kNoLibraries = 77;  // exit code of tokenizer_reference.py without them
constexpr int kTexts = 10000;

// Runs tokenizer_reference.py and returns its exit code.
int make_reference(const std::string& what, const std::filesystem::path& folder,
                   std::string& output) {
  const std::string source = SBTRAIN_SOURCE;
  Process process({"bash", "-c", "exec \"$(\"$1/scripts/python.sh\")\" \"${@:2}\"", "bash", source,
                   source + "/tests/unit/data/tokenizer_reference.py", what, folder, "--count",
                   std::to_string(kTexts)},
                  folder.string() + ".log");
  const int code = process.wait(800);
  output = process.output();
  return code;
}

TEST(TokenizerParity, GivesTheTokensOfTheOriginals) {
  const TemporaryFolder folder;
  std::string output;
  const int code = make_reference("families", folder / "families", output);
  if (code == kNoLibraries) GTEST_SKIP() << output;
  ASSERT_EQ(code, 0) << output;
  int families = 0;
  for (const auto& family : std::filesystem::directory_iterator(folder / "families")) {
    EXPECT_EQ(expect_tokens(family.path()), kTexts) << family.path();
    ++families;
  }
  EXPECT_EQ(families, 9);
}

// Hugging Face's library loads what is trained here, and gives the same tokens.
TEST(TokenizerParity, ATrainedTokenizerIsOneOfTheOriginal) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder / "trained");
  std::ifstream file(SBTRAIN_SOURCE "/tests/data/english.jsonl");
  const NextText next = [&](std::string& text) {
    std::string line;
    if (!std::getline(file, line)) return false;
    text = nlohmann::json::parse(line)["text"].get<std::string>();
    return true;
  };
  train_tokenizer(next, {.type = TokenizerType::kBpe, .vocab = 2000},
                  folder / "trained/tokenizer.json");
  std::string output;
  const int code = make_reference("tokens", folder / "trained", output);
  if (code == kNoLibraries) GTEST_SKIP() << output;
  ASSERT_EQ(code, 0) << output;
  EXPECT_EQ(expect_tokens(folder / "trained"), kTexts);
}

}  // namespace
}  // namespace sbtrain::test
