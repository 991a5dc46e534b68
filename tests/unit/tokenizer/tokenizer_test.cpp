#include "tokenizer/tokenizer.h"

#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include "unit/data/stores.h"

namespace sbtrain::test {
namespace {

using namespace std::string_literals;
using TokenizerTest = EnglishTest;

TEST_F(TokenizerTest, SpecialIdsAndSize) {
  EXPECT_EQ(tokenizer().size(), 700);
  EXPECT_EQ(tokenizer().unk(), 0);
  EXPECT_EQ(tokenizer().bos(), 1);
  EXPECT_EQ(tokenizer().eos(), 2);
  EXPECT_TRUE(tokenizer().lossless());
  EXPECT_EQ(tokenizer().hash().size(), 64u);
  const std::vector<int32_t> control = {1, 2};
  EXPECT_EQ(tokenizer().decode(control), "");
}

TEST_F(TokenizerTest, RoundTripsRealText) {
  for (const std::string& text : english_texts()) {
    const std::vector<int32_t> ids = tokenizer().encode(text);
    EXPECT_EQ(tokenizer().decode(ids), text);
    EXPECT_LT(ids.size(), text.size() / 2) << "hardly any pieces were learned";
    int64_t bytes = 0;
    for (const int32_t id : ids) bytes += tokenizer().byte_length(id);
    EXPECT_EQ(bytes, static_cast<int64_t>(text.size()));
  }
}

TEST_F(TokenizerTest, RoundTripsAnyBytes) {
  std::vector<std::string> texts = {
      "",
      " ",
      "  ",
      "\n",
      "\n\n\n",
      "\t\t x\t",
      " leading",
      "trailing ",
      "a  b   c    d",
      "line\r\nline\r",
      "1234567890 3.14",
      "<s></s><unk>",
      "<0x0A><0x41>",
      "\0\0x\0"s,
      "\xc3\xa9 vs e\xcc\x81 vs \xef\xac\x81 \xef\xbc\xa1\xc2\xa0.",  // what NFKC would change
      "\xf0\x9f\x91\xa9\xe2\x80\x8d\xf0\x9f\x92\xbb \xf0\x9f\x87\xb3\xf0\x9f\x87\xb4",  // emoji
      "\xe4\xbd\xa0\xe5\xa5\xbd \xd8\xb3\xd9\x84\xd8\xa7\xd9\x85 \xd7\xa9\xd7\x9c",
      "\xe2\x80\xae\xef\xbb\xbf\xe2\x80\xa8\xc2\x85\xef\xbf\xbd",  // marks, BOM, separators
      "\x80\xff\xc0\xaf\xed\xa0\x80\xf4\x90\x80\x80\xe2\x96",      // invalid UTF-8
      "cut \xe2\x82",
      std::string(20000, ' '),
      std::string(20000, 'a'),
  };
  std::string all;
  for (int byte = 0; byte < 256; ++byte) all += static_cast<char>(byte);
  texts.push_back(all);
  const Philox random(7, RandomPurpose::kTest, "bytes");
  for (uint64_t i = 0; i < 200; ++i) {
    std::string text;
    for (uint64_t k = 0; k < i; ++k) text += static_cast<char>(random.bits(1000 * i + k) >> 24);
    texts.push_back(text);
  }
  for (const std::string& text : texts) {
    EXPECT_EQ(tokenizer().decode(tokenizer().encode(text)), text);
  }
}

// U+2581 is a space to sentencepiece, also next to spaces at which long text may be cut.
TEST_F(TokenizerTest, SentencepiecesMarkIsASpace) {
  sentencepiece::SentencePieceProcessor reference;
  ASSERT_TRUE(reference.Load(tokenizer().path()).ok());
  std::string cuts;
  while (cuts.size() < 3 * Tokenizer::kChunkBytes) cuts += "word\xe2\x96\x81 word\xe2\x96\x81 ";
  for (const std::string& text :
       {"\xe2\x96\x81"s, " \xe2\x96\x81\xe2\x96\x81 x\xe2\x96\x81"s, cuts}) {
    std::vector<int> expected;
    ASSERT_TRUE(reference.Encode(text, &expected).ok());
    EXPECT_TRUE(tokenizer().encode(text) == expected) << text.substr(0, 40);
  }
  EXPECT_EQ(tokenizer().decode(tokenizer().encode("a\xe2\x96\x81 b")), "a  b");
}

TEST_F(TokenizerTest, LineByLineGivesSentencepiecesOwnIds) {
  sentencepiece::SentencePieceProcessor reference;
  ASSERT_TRUE(reference.Load(tokenizer().path()).ok());
  for (const std::string& text : english_texts()) {
    std::vector<int> expected;
    ASSERT_TRUE(reference.Encode(text, &expected).ok());
    EXPECT_EQ(tokenizer().encode(text), expected);
  }
}

// Like Llama's tokenizer: byte fallback, no normalisation, a space before each text.
std::string train_with_dummy_prefix(const std::string& prefix) {
  const auto status = sentencepiece::SentencePieceTrainer::Train(
      "--input=" + prefix + ".txt --model_prefix=" + prefix +
      " --model_type=bpe --vocab_size=600 --byte_fallback=true --minloglevel=3"
      " --normalization_rule_name=identity --remove_extra_whitespaces=false");
  EXPECT_TRUE(status.ok()) << status.ToString();
  return prefix + ".model";
}

TEST_F(TokenizerTest, ADummyPrefixComesOnceInEachText) {
  std::string text;
  for (const std::string& document : english_texts()) text += document + "\n";
  write_file(path("dummy.txt"), text);
  const Tokenizer dummy(train_with_dummy_prefix(path("dummy")));
  sentencepiece::SentencePieceProcessor reference;
  ASSERT_TRUE(reference.Load(dummy.path()).ok());
  EXPECT_FALSE(dummy.lossless());
  EXPECT_NE(dummy.flaw().find("add_dummy_prefix"), std::string::npos) << dummy.flaw();
  for (const std::string& hostile :
       {"a\0b"s, "\0b"s, "a\xff\xfe"s + "b c", "\xff"s + "word"s, "x\0\0\n\0y"s}) {
    const std::string decoded = dummy.decode(dummy.encode(hostile));
    const bool prefixed = hostile[0] != '\xff';
    EXPECT_EQ(decoded, (prefixed ? " " : "") + hostile);
  }
  for (const std::string& valid : {"\n\nlines\n"s, "a line\nand another\n"s, text}) {
    std::vector<int> expected;
    ASSERT_TRUE(reference.Encode(valid, &expected).ok());
    EXPECT_TRUE(dummy.encode(valid) == expected) << valid.substr(0, 40);
  }
}

TEST_F(TokenizerTest, PartsGiveTheTokensOfTheWhole) {
  sentencepiece::SentencePieceProcessor reference;
  ASSERT_TRUE(reference.Load(tokenizer().path()).ok());
  std::string words;
  for (const std::string& document : english_texts()) words += document;
  std::replace(words.begin(), words.end(), '\n', ' ');
  ASSERT_GT(words.size(), 0U);
  while (words.size() < 3 * Tokenizer::kChunkBytes) words += words;
  EXPECT_TRUE(tokenizer().first_chunk(words).exact);
  EXPECT_LE(tokenizer().first_chunk(words).bytes, Tokenizer::kChunkBytes);
  std::vector<int> expected;
  ASSERT_TRUE(reference.Encode(words, &expected).ok());
  EXPECT_TRUE(tokenizer().encode(words) == expected);
}

TEST_F(TokenizerTest, TextWithoutAPlaceToCutIsCutBetweenCharacters) {
  std::string text;
  while (text.size() <= Tokenizer::kChunkBytes) text += "\xe4\xbd\xa0";
  const Tokenizer::Chunk chunk = tokenizer().first_chunk(text);
  EXPECT_FALSE(chunk.exact);
  EXPECT_EQ(chunk.bytes % 3, 0U);
  EXPECT_GT(chunk.bytes, Tokenizer::kChunkBytes - 4);
  EXPECT_EQ(tokenizer().decode(tokenizer().encode(text)), text);
}

TEST_F(TokenizerTest, SameTextSameModel) {
  const Tokenizer other = train_english(path("other.model"));
  EXPECT_EQ(other.hash(), tokenizer().hash());
  EXPECT_FALSE(std::filesystem::exists(path("other.model.tmp")));
}

TEST_F(TokenizerTest, DigitsAreSplit) {
  EXPECT_EQ(tokenizer().encode("2024").size(), 4u);
}

TEST_F(TokenizerTest, RefusesWhatIsNoModel) {
  const std::string file = path("bad.model");
  EXPECT_EQ(thrown_by([&] { Tokenizer missing(file); }).code, ExitCode::kData);
  write_file(file, "not a model");
  const Thrown bad = thrown_by([&] { Tokenizer damaged(file); });
  EXPECT_EQ(bad.code, ExitCode::kData);
  EXPECT_TRUE(bad.says(file)) << bad.message;
  const std::vector<int32_t> outside = {700};
  EXPECT_EQ(thrown_by([&] { tokenizer().decode(outside); }).code, ExitCode::kData);
}

TEST_F(TokenizerTest, TooLittleTextIsAnError) {
  bool given = false;
  const NextText next = [&](std::string& text) {
    text = "a few words and no more";
    return !std::exchange(given, true);
  };
  const std::string file = path("little.model");
  const Thrown little = thrown_by([&] { train_tokenizer(next, {.vocab = 4096}, file); });
  EXPECT_EQ(little.code, ExitCode::kUsage) << little.message;
  EXPECT_FALSE(std::filesystem::exists(file));
}

TEST_F(TokenizerTest, SamplesLargeText) {
  const std::vector<std::string> texts = english_texts();
  size_t i = 0;
  const std::string file = path("sampled.model");
  train_tokenizer(one_by_one(texts, i), {.vocab = 400, .max_bytes = 20000}, file);
  EXPECT_EQ(i, texts.size());
  const Tokenizer sampled(file);
  EXPECT_EQ(sampled.decode(sampled.encode(texts[0])), texts[0]);
}

}  // namespace
}  // namespace sbtrain::test
