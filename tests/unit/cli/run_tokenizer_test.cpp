#include "cli/run_tokenizer.h"

#include <gtest/gtest.h>

#include "core/error.h"
#include "support/process.h"

namespace sbtrain::test {
namespace {

TEST(RunTokenizer, ThePromptStartsAsDocumentsDid) {
  const TemporaryFolder folder;
  // The words consist of syllables, so that there are enough pieces to learn.
  const std::string consonants = "bcdfgklmnprstvw";
  const std::string vowels = "aeiou";
  std::string text = "a word and another word\n";
  for (size_t i = 0; i < 3000; ++i) {
    text += {consonants[i % 15], vowels[i / 15 % 5], consonants[i / 7 % 15], vowels[i / 3 % 5]};
    text += i % 8 == 7 ? '\n' : ' ';
  }
  bool given = false;
  train_tokenizer([&](std::string& out) { return out = text, !std::exchange(given, true); },
                  {.vocab = 300}, folder / "t.model");
  const Tokenizer tokenizer(folder / "t.model");
  std::vector<int32_t> word = tokenizer.encode("word");
  EXPECT_EQ(prompt_tokens(tokenizer, {}, "word"), word);
  EXPECT_EQ(prompt_tokens(tokenizer, {}, ""), std::vector<int32_t>{tokenizer.eos()});
  word.insert(word.begin(), tokenizer.bos());
  EXPECT_EQ(prompt_tokens(tokenizer, {.tokenizer_hash = {}, .starts_with_bos = true}, "word"),
            word);
  EXPECT_EQ(prompt_tokens(tokenizer, {.tokenizer_hash = {}, .starts_with_bos = true}, ""),
            std::vector<int32_t>{tokenizer.bos()});
  EXPECT_NO_THROW(check_tokenizer(tokenizer, {}));
  EXPECT_NO_THROW(check_tokenizer(tokenizer, {.tokenizer_hash = tokenizer.hash()}));
  EXPECT_THROW(check_tokenizer(tokenizer, {.tokenizer_hash = "other"}), Error);
}

}  // namespace
}  // namespace sbtrain::test
