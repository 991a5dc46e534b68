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
                   std::string& output, const std::vector<std::string>& more = {}) {
  const std::string source = SBTRAIN_SOURCE;
  std::vector<std::string> command = {"bash",
                                      "-c",
                                      "exec \"$(\"$1/scripts/python.sh\")\" \"${@:2}\"",
                                      "bash",
                                      source,
                                      source + "/tests/unit/tokenizer/tokenizer_reference.py",
                                      "--count",
                                      std::to_string(kTexts),
                                      what,
                                      folder};
  command.insert(command.end(), more.begin(), more.end());
  Process process(command, folder.string() + ".log");
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

// Hugging Face's library gives the tokens of tiktoken's ranks with the tokenizer.json that is made
// of them for an export.
TEST(TokenizerParity, RanksAreATokenizerOfTheOtherLibrary) {
  namespace fs = std::filesystem;
  const TemporaryFolder folder;
  std::string output;
  const int code =
      make_reference("families", folder / "ranks", output, {"--only", "tiktoken_llama3"});
  if (code == kNoLibraries) GTEST_SKIP() << output;
  ASSERT_EQ(code, 0) << output;
  const std::vector<std::string> names = {"gpt2", "cl100k_base", "o200k_base", "llama3", "qwen"};
  std::vector<std::string> folders;
  for (const std::string& name : names) {
    const fs::path family = folder.path() / name;
    fs::create_directory(family);
    const fs::path ranks = family / (name + ".tiktoken");
    fs::copy_file(folder.path() / "ranks/tiktoken_llama3/llama3.tiktoken", ranks);
    write_file(family / "tokenizer.json", tiktoken_as_json(ranks, /*bos=*/true));
    folders.push_back(family);
  }
  ASSERT_EQ(make_reference("tokens", folders.front(), output, {folders.begin() + 1, folders.end()}),
            0)
      << output;
  for (const std::string& name : names) {
    const fs::path family = folder.path() / name;
    EXPECT_EQ(expect_tokens(family), kTexts) << name;
    fs::remove(family / "tokenizer.json");
    EXPECT_EQ(expect_tokens(family), kTexts) << name << ", the ranks themselves";
  }
}

TEST(TokenizerParity, GivesTheTokensOfSentencepiece) {
  const TemporaryFolder folder;
  std::string output;
  const int code = make_reference("sentencepiece", folder / "models", output);
  if (code == kNoLibraries) GTEST_SKIP() << output;
  ASSERT_EQ(code, 0) << output;
  int models = 0;
  for (const auto& model : std::filesystem::directory_iterator(folder / "models")) {
    EXPECT_EQ(expect_tokens(model.path()), kTexts) << model.path();
    ++models;
  }
  EXPECT_EQ(models, 4);
}

}  // namespace
}  // namespace sbtrain::test
