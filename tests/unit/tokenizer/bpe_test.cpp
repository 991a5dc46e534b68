// Byte-level BPE: tokenizer.json and tiktoken's ranks.
#include <algorithm>
#include <chrono>
#include <map>
#include <nlohmann/json.hpp>

#include "core/utf8.h"
#include "support/expected_tokens.h"
#include "tokenizer/byte_pairs.h"
#include "tokenizer/nfc.h"
#include "tokenizer/split_pattern.h"
#include "tokenizer/tokenizer_files.h"
#include "unit/data/stores.h"

namespace sbtrain::test {
namespace {

namespace fs = std::filesystem;
using namespace std::string_literals;
using Json = nlohmann::json;

fs::path golden(const std::string& name) {
  return fs::path(SBTRAIN_TEST_DATA) / "tokenizer" / name;
}
Json qwen() {
  return Json::parse(read_file(golden("qwen/tokenizer.json")));
}

class Bpe : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return folder_ / name; }
  // Writes a tokenizer.json and loads it.
  Tokenizer load(const Json& json, const TokenizerOptions& options = {}) const {
    write_file(path("tokenizer.json"), json.dump());
    return Tokenizer(path("tokenizer.json"), options);
  }
  Thrown refused(const Json& json) const {
    return thrown_by([&] { load(json); });
  }

 private:
  TemporaryFolder folder_;
};

TEST_F(Bpe, GivesTheTokensOfTheOriginals) {
  for (const char* name : {"qwen", "llama3", "o200k_base"}) {
    EXPECT_EQ(expect_tokens(golden(name)), 120) << name;
  }
}

TEST_F(Bpe, KnowsItsSpecialTokens) {
  const Tokenizer llama3(golden("llama3/tokenizer.json"));
  EXPECT_EQ(llama3.size(), 505);
  EXPECT_EQ(llama3.special().at("<|eot_id|>"), 504);
  EXPECT_EQ(llama3.bos(), 500);  // by its post-processor
  EXPECT_EQ(llama3.eos(), 501);  // by its name
  EXPECT_EQ(llama3.bytes(500), "");
  EXPECT_TRUE(llama3.adds_bos());  // by its post-processor
  EXPECT_TRUE(llama3.lossless());
  EXPECT_EQ(llama3.hash(), tokenizer_fingerprint(llama3.path()));
  const Tokenizer qwen_tokenizer(golden("qwen/tokenizer.json"));
  EXPECT_EQ(qwen_tokenizer.bos(), -1);
  EXPECT_FALSE(qwen_tokenizer.adds_bos());
  EXPECT_EQ(qwen_tokenizer.eos(), qwen_tokenizer.special().at("<|endoftext|>"));
  EXPECT_NE(qwen_tokenizer.flaw().find("NFC"), std::string::npos);
  const Tokenizer o200k(golden("o200k_base/o200k_base.tiktoken"));
  EXPECT_EQ(o200k.eos(), 199999);
  EXPECT_EQ(o200k.size(), 200019);
}

TEST_F(Bpe, TheConfigurationBesideItNamesBosAndEos) {
  const Json json = qwen();
  write_file(
      path("tokenizer_config.json"),
      R"({"bos_token": null, "eos_token": {"content": "<|im_end|>"}, "chat_template": "x"})");
  const Tokenizer tokenizer = load(json);
  EXPECT_EQ(tokenizer.eos(), tokenizer.special().at("<|im_end|>"));
  EXPECT_EQ(tokenizer.bos(), -1);
  write_file(path("tokenizer_config.json"), R"({"eos_token": "<|other|>"})");
  const Thrown other = refused(json);
  EXPECT_TRUE(other.code == ExitCode::kData && other.says("tokenizer_config.json") &&
              other.says("<|other|>"))
      << other.message;
}

TEST_F(Bpe, TheConfigurationBesideItSaysWhetherATextBeginsWithBos) {
  const Json llama3 = Json::parse(read_file(golden("llama3/tokenizer.json")));
  write_file(path("tokenizer_config.json"), R"({"add_bos_token": false})");
  EXPECT_FALSE(load(llama3).adds_bos());
  write_file(path("tokenizer_config.json"), R"({"add_bos_token": true})");
  EXPECT_TRUE(load(qwen()).adds_bos());
  write_file(path("tokenizer_config.json"), R"({"add_bos_token": null})");
  EXPECT_TRUE(load(llama3).adds_bos());
  const std::vector<std::string> texts = english_texts();
  size_t given = 0;
  train_tokenizer(one_by_one(texts, given), {.vocab = 400}, path("tokenizer.model"));
  EXPECT_FALSE(Tokenizer(path("tokenizer.model")).adds_bos());
  write_file(path("tokenizer_config.json"), R"({"add_bos_token": true})");
  EXPECT_TRUE(Tokenizer(path("tokenizer.model")).adds_bos());
}

TEST_F(Bpe, SpecialTokensInTextAreTextUnlessAskedFor) {
  const std::string text = "a<|im_end|>b";
  const Tokenizer plain(golden("qwen/tokenizer.json"));
  const Tokenizer special(golden("qwen/tokenizer.json"), {.special = true});
  EXPECT_EQ(plain.decode(plain.encode(text)), text);
  const std::vector<int32_t> ids = special.encode(text);
  EXPECT_EQ(ids.size(), 3u);
  EXPECT_EQ(ids[1], special.special().at("<|im_end|>"));
  EXPECT_EQ(special.decode(ids), "ab");
}

TEST_F(Bpe, RoundTripsAnyBytes) {
  const Tokenizer tokenizer(golden("llama3/tokenizer.json"));
  std::string all;
  for (int byte = 0; byte < 256; ++byte) all += static_cast<char>(byte);
  std::vector<std::string> texts = {
      "", "\0\0x\0"s, "cut \xe2\x82", "\x80\xff\xc0\xaf\xed\xa0\x80", "\xf4\x90\x80\x80\xe2\x96"s,
      all};
  const Philox random(7, RandomPurpose::kTest, "bytes");
  for (uint64_t i = 0; i < 200; ++i) {
    std::string text;
    for (uint64_t k = 0; k < i; ++k) text += static_cast<char>(random.bits(1000 * i + k) >> 24);
    texts.push_back(text);
  }
  for (const std::string& text : english_texts()) texts.push_back(text);
  for (const std::string& text : texts) EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
}

// The special tokens of o200k_base leave ids out, those of llama3 do not.
TEST_F(Bpe, RanksAsATokenizerJsonGiveTheSameTokens) {
  const fs::path ranks = golden("o200k_base/o200k_base.tiktoken");
  write_file(path("tokenizer.json"), tiktoken_as_json(ranks, /*bos=*/false));
  fs::copy_file(golden("o200k_base/expected.jsonl"), path("expected.jsonl"));
  EXPECT_EQ(expect_tokens(path("")), 120);
  const Tokenizer json(path("tokenizer.json"));
  EXPECT_EQ(json.special(), Tokenizer(ranks).special());
  EXPECT_EQ(json.eos(), 199999);
  EXPECT_EQ(json.size(), 200019);
  const Json file = Json::parse(read_file(path("tokenizer.json")));
  EXPECT_EQ(file["model"]["vocab"]["<|endoftext|>"], 199999) << "added tokens would be renumbered";
  for (const char* name : {"gpt2", "cl100k_base", "qwen", "llama3"}) {
    const std::string copy = path(name + ".tiktoken"s);
    write_file(copy, read_file(ranks));
    write_file(path("tokenizer.json"), tiktoken_as_json(copy, /*bos=*/true));
    const Tokenizer original(copy);
    const Tokenizer same(path("tokenizer.json"));
    EXPECT_EQ(same.special(), original.special()) << name;
    EXPECT_EQ(same.bos(), original.bos()) << name;
    EXPECT_EQ(same.adds_bos(), original.bos() >= 0) << name;
    for (const std::string& text : english_texts()) {
      EXPECT_EQ(same.encode(text + " \n\n "), original.encode(text + " \n\n ")) << name;
    }
  }
}

// ---- What is not supported is refused by its name.

TEST_F(Bpe, RefusesComponentsByTheirNames) {
  const std::vector<std::pair<std::string, std::function<void(Json&)>>> changes = {
      {"Lowercase",
       [](Json& t) {
         t["normalizer"] = {{"type", "Lowercase"}};
       }},
      {"NFKC",
       [](Json& t) {
         t["normalizer"] = {{"type", "Sequence"},
                            {"normalizers", {{{"type", "NFC"}}, {{"type", "NFKC"}}}}};
       }},
      {"Metaspace",
       [](Json& t) {
         t["pre_tokenizer"] = {{"type", "Metaspace"}};
       }},
      {"ByteLevel", [](Json& t) { t["pre_tokenizer"] = nullptr; }},
      {"add_prefix_space",
       [](Json& t) { t["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = true; }},
      {"MergedWithNext",
       [](Json& t) { t["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "MergedWithNext"; }},
      {"after ByteLevel",
       [](Json& t) {
         t["pre_tokenizer"]["pretokenizers"].push_back({{"type", "Digits"}});
       }},
      {"decoder Metaspace",
       [](Json& t) {
         t["decoder"] = {{"type", "Metaspace"}};
       }},
      {"BertProcessing",
       [](Json& t) {
         t["post_processor"] = {{"type", "BertProcessing"}};
       }},
      {"Unigram", [](Json& t) { t["model"]["type"] = "Unigram"; }},
      {"byte_fallback", [](Json& t) { t["model"]["byte_fallback"] = true; }},
      {"dropout", [](Json& t) { t["model"]["dropout"] = 0.1; }},
      {"end_of_word_suffix", [](Json& t) { t["model"]["end_of_word_suffix"] = "</w>"; }},
      {"a Sequence in a Sequence",
       [](Json& t) {
         t["normalizer"] = {{"type", "Sequence"},
                            {"normalizers", {{{"type", "Sequence"}, {"normalizers", {}}}}}};
       }},
  };
  for (const auto& [name, change] : changes) {
    Json json = qwen();
    change(json);
    const Thrown thrown = refused(json);
    EXPECT_TRUE(thrown.code == ExitCode::kData && thrown.says(name)) << name << thrown.message;
  }
}

TEST_F(Bpe, RefusesDamagedFiles) {
  const std::vector<std::pair<std::string, std::function<void(Json&)>>> changes = {
      {"no \"model\"", [](Json& t) { t.erase("model"); }},
      {"vocab", [](Json& t) { t["model"]["vocab"] = 3; }},
      {"merge 0", [](Json& t) { t["model"]["merges"][0] = "no merge"; }},
      {"merge 1", [](Json& t) { t["model"]["merges"][1] = Json::array(); }},
      {"no token for byte", [](Json& t) { t["model"]["vocab"].erase("!"); }},
      {"integer", [](Json& t) { t["model"]["vocab"]["!"] = -1; }},
      {"integer", [](Json& t) { t["model"]["vocab"]["!"] = 1e300; }},
      {"integer", [](Json& t) { t["model"]["vocab"]["!"] = 1 << 30; }},
      // A small file would take the memory of millions of tokens.
      {"integer", [](Json& t) { t["model"]["vocab"]["!"] = 1 << 23; }},
      {"two tokens", [](Json& t) { t["model"]["vocab"]["!"] = 7; }},
      {"do not agree", [](Json& t) { t["added_tokens"][0]["id"] = 5; }},
      {"the same id",
       [](Json& t) {
         t["added_tokens"].push_back({{"id", 600}, {"content", "one"}});
         t["added_tokens"].push_back({{"id", 600}, {"content", "other"}});
       }},
      {"two ids",
       [](Json& t) {
         t["added_tokens"].push_back({{"id", 600}, {"content", "one"}});
         t["added_tokens"].push_back({{"id", 601}, {"content", "one"}});
       }},
      {"neither true nor false", [](Json& t) { t["added_tokens"][0]["special"] = "yes"; }},
      {"type", [](Json& t) { t["normalizer"] = Json::object(); }},
  };
  for (const auto& [name, change] : changes) {
    Json json = qwen();
    change(json);
    const Thrown thrown = refused(json);
    EXPECT_TRUE(thrown.code == ExitCode::kData && thrown.says(name)) << name << thrown.message;
  }
  write_file(path("cut.json"), qwen().dump().substr(0, 5000));
  EXPECT_EQ(thrown_by([&] { Tokenizer(path("cut.json")); }).code, ExitCode::kData);
  write_file(path("deep.json"), "{\"model\":" + std::string(1 << 20, '['));
  EXPECT_EQ(thrown_by([&] { Tokenizer(path("deep.json")); }).code, ExitCode::kData);
}

TEST_F(Bpe, TiktokenFilesNeedAnEncoding) {
  const std::string ranks = read_file(golden("o200k_base/o200k_base.tiktoken"));
  write_file(path("some.tiktoken"), ranks);
  const Thrown nameless = thrown_by([&] { Tokenizer(path("some.tiktoken")); });
  EXPECT_TRUE(nameless.code == ExitCode::kData && nameless.says("cl100k_base")) << nameless.message;
  write_file(path("gpt2.huge.tiktoken"), ranks + "aXQ= 9999999\n");
  const Thrown huge = thrown_by([&] { Tokenizer(path("gpt2.huge.tiktoken")); });
  EXPECT_TRUE(huge.code == ExitCode::kData && huge.says("rank")) << huge.message;
  write_file(path("gpt2.tiktoken"), ranks);
  write_file(path("o200k_base.my.tiktoken"), ranks);
  const Tokenizer gpt2(path("gpt2.tiktoken"));
  const Tokenizer o200k(path("o200k_base.my.tiktoken"));
  EXPECT_EQ(gpt2.eos(), 50256);
  EXPECT_NE(gpt2.hash(), o200k.hash()) << "they give other tokens for the same text";
  EXPECT_EQ(o200k.hash(), tokenizer_fingerprint(golden("o200k_base/o200k_base.tiktoken")));
  for (const std::string line :
       {"IQ==", "IQ= 1", "!!!! 1", "IQ== x", "IQ== -1", "IQ== 99999999999"}) {
    write_file(path("gpt2.tiktoken"), ranks + line + "\n");
    const Thrown thrown = thrown_by([&] { Tokenizer(path("gpt2.tiktoken")); });
    EXPECT_TRUE(thrown.code == ExitCode::kData && thrown.says("line 501")) << thrown.message;
  }
  write_file(path("gpt2.tiktoken"), ranks + "IQ== 700\n");
  EXPECT_TRUE(thrown_by([&] { Tokenizer(path("gpt2.tiktoken")); }).says("twice"));
}

TEST_F(Bpe, CopiesKeepTheirNamesAndCompanions) {
  write_file(path("mine.json"), read_file(golden("qwen/tokenizer.json")));
  write_file(path("chat_template.jinja"), "{{ messages }}");
  const std::vector<TokenizerFile> files = tokenizer_files(path("mine.json"));
  ASSERT_EQ(files.size(), 2u);
  EXPECT_EQ(files[0].name, "tokenizer.json");
  EXPECT_EQ(files[1].name, "chat_template.jinja");
  EXPECT_EQ(tokenizer_files(golden("o200k_base/o200k_base.tiktoken"))[0].name,
            "o200k_base.tiktoken");
  EXPECT_EQ(find_tokenizer(golden("o200k_base").string()),
            golden("o200k_base/o200k_base.tiktoken").string());
  EXPECT_EQ(find_tokenizer(path("nowhere")), "");
}

// ---- Parts of long texts

// The tokens of the chunks are those of the whole, which the model itself encodes in one.
void expect_exact_parts(const Tokenizer& tokenizer, const std::string& text) {
  ASSERT_GT(text.size(), Tokenizer::kChunkBytes);
  const Tokenizer::Chunk chunk = tokenizer.first_chunk(text);
  EXPECT_TRUE(chunk.exact);
  EXPECT_LE(chunk.bytes, Tokenizer::kChunkBytes);
  EXPECT_GT(chunk.bytes, Tokenizer::kChunkBytes - 2000);
  // A text of half the size around the cut is encoded in one chunk.
  const size_t from = chunk.bytes - 1000;
  const std::string around = text.substr(from, 3000);
  std::vector<int32_t> cut = tokenizer.encode(around.substr(0, 1000));
  tokenizer.encode(around.substr(1000), cut);
  EXPECT_EQ(cut, tokenizer.encode(around)) << around.substr(980, 40);
}

TEST_F(Bpe, ALongTextIsCutWhereNoTokenChanges) {
  std::string english;
  for (const std::string& text : english_texts()) english += text;
  while (english.size() < 2 * Tokenizer::kChunkBytes) english += english;
  for (const char* name :
       {"qwen/tokenizer.json", "llama3/tokenizer.json", "o200k_base/o200k_base.tiktoken"}) {
    const Tokenizer tokenizer(golden(name), {.special = true});
    const Philox random(1, RandomPurpose::kTest, name);
    for (uint64_t i = 0; i < 12; ++i) {
      expect_exact_parts(tokenizer, english.substr(random.bits64(i) % 5000));
    }
    std::string mixed;  // composed characters, special tokens, rows of spaces, invalid bytes
    const std::vector<std::string> bits = {
        "e\xcc\x81", "<|endoftext|>", "<|im_end|>", "   ", "\n \n",       "\xe4\xbd\xa0",
        "12345",     " word",         "\xff",       "'s",  "\xed\x95\x9c"};
    for (uint64_t i = 0; mixed.size() < 2 * Tokenizer::kChunkBytes; ++i) {
      mixed += bits[random.bits64(100 + i) % bits.size()];
    }
    for (size_t i = 0; i < 12; ++i) expect_exact_parts(tokenizer, mixed.substr(17 * i));
  }
}

TEST_F(Bpe, TextWithoutAPlaceToCutIsCutBetweenCharacters) {
  const Tokenizer tokenizer(golden("llama3/tokenizer.json"));
  std::string text;
  while (text.size() <= Tokenizer::kChunkBytes) text += "\xe4\xbd\xa0";
  const Tokenizer::Chunk chunk = tokenizer.first_chunk(text);
  EXPECT_FALSE(chunk.exact);
  EXPECT_EQ(chunk.bytes % 3, 0u);
  EXPECT_GT(chunk.bytes, Tokenizer::kChunkBytes - 4);
  EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
}

// Each of these would take minutes if any step were quadratic in the length of the text.
TEST_F(Bpe, HostileTextTakesLinearTime) {
  const size_t bytes = size_t{1} << 20;
  const auto repeated = [&](std::string_view unit) {
    std::string text;
    while (text.size() < bytes) text += unit;
    return text;
  };
  for (const char* name :
       {"qwen/tokenizer.json", "llama3/tokenizer.json", "o200k_base/o200k_base.tiktoken"}) {
    const Tokenizer tokenizer(golden(name));
    for (const char* unit : {"a", " ", "\n", "aA", "\xcc\x81\xcc\xa3", "1", "<|im_", " \t", "\xff",
                             "\xe1\x84\x80", "a\xcc\x81"}) {
      const std::string text = repeated(unit);
      const std::vector<int32_t> ids = tokenizer.encode(text);
      if (tokenizer.lossless()) {
        EXPECT_TRUE(tokenizer.decode(ids) == text) << name << unit;
      }
    }
  }
}

// Each place of the text would look at all of it.
TEST_F(Bpe, HostileTokensTakeLinearTime) {
  Json json = qwen();
  json["added_tokens"].push_back(
      {{"id", 600}, {"content", " "}, {"rstrip", true}, {"lstrip", true}, {"normalized", false}});
  const Tokenizer spaces = load(json);
  EXPECT_GT(spaces.encode(std::string(200000, ' ')).size(), 0u);
  json["added_tokens"].back() = {{"id", 600}, {"content", std::string(1025, 'a')}};
  EXPECT_TRUE(refused(json).says("1024"));
  json["added_tokens"].erase(json["added_tokens"].size() - 1);
  Json& splits = json["pre_tokenizer"]["pretokenizers"];
  const Json split = splits[0];
  for (int i = 0; i < 64; ++i) splits.insert(splits.begin(), split);
  EXPECT_TRUE(refused(json).says("more than 64 splits"));
}

// ---- The parts it is made of

// The definition, word for word: the pair of lowest rank, the leftmost of equal ones.
std::vector<int32_t> merge_slowly(std::string_view piece, const BytePairs::Description& d) {
  std::vector<int32_t> ids;
  for (const char byte : piece) ids.push_back(d.byte_ids[static_cast<uint8_t>(byte)]);
  while (true) {
    const BytePairs::Merge* best = nullptr;
    size_t at = 0;
    for (size_t i = 0; i + 1 < ids.size(); ++i) {
      for (const BytePairs::Merge& merge : d.merges) {
        if (merge.left != ids[i] || merge.right != ids[i + 1]) continue;
        if (best == nullptr || merge.rank < best->rank) {
          best = &merge;
          at = i;
        }
      }
    }
    if (best == nullptr) return ids;
    ids[at] = best->result;
    ids.erase(ids.begin() + static_cast<int64_t>(at) + 1);
  }
}

TEST(BytePairs, ShortAndLongPiecesFollowTheDefinition) {
  BytePairs::Description d;
  for (int i = 0; i < 256; ++i) d.byte_ids[static_cast<size_t>(i)] = i;
  const Philox random(3, RandomPurpose::kTest, "merges");
  for (uint64_t i = 0; i < 40; ++i) {  // few letters, so that merges compete
    const auto token = [&](uint64_t n) {
      const uint64_t r = random.bits64(10 * i + n) % (3 + i);
      return static_cast<int32_t>(r < 3 ? 'a' + r : 256 + r - 3);
    };
    // Some pairs share a rank, as tiktoken's do.
    d.merges.push_back(
        {token(0), token(1), static_cast<int32_t>(i / 2), static_cast<int32_t>(256 + i)});
  }
  const BytePairs pairs(d);
  BytePairs::Scratch scratch;
  for (uint64_t length = 1; length < 200; ++length) {
    std::string piece;
    for (uint64_t k = 0; k < length; ++k) {
      piece += static_cast<char>('a' + random.bits64(1000000 + 200 * length + k) % 3);
    }
    std::vector<int32_t> ids;
    pairs.encode(piece, ids, scratch);
    EXPECT_EQ(ids, merge_slowly(piece, d)) << piece;
    std::vector<int32_t> again;
    pairs.encode(piece, again, scratch);
    EXPECT_EQ(again, ids) << "remembered";
  }
}

TEST(SplitPattern, RefusesWhatMeansSomethingElseInPcre2) {
  using Syntax = SplitPattern::Syntax;
  for (const char* pattern :
       {R"(\w+)",   R"(\bx)",         R"(\h)",   R"(\v)", R"(\R)",   R"(\K)", R"((?i)a)",
        "(*UCP)a",  R"([[:alpha:]])", "[a&&b]",  "a{,3}", "a{1,3}+", "[]a]",  R"(\x41)",
        R"((a)\1)", R"(\p{Alpha}+)",  R"([\S])", "a*",    "",        "(",     "a|"}) {
    EXPECT_EQ(thrown_by([&] { SplitPattern(pattern, Syntax::kOniguruma, "t"); }).code,
              ExitCode::kData)
        << pattern;
  }
  for (const char* pattern : {R"(\p{Han}+)", R"(\u0041)", R"(\x{1f600}a)", R"(\d+)", "a++",
                              "(?i:x)", R"([^\s]+)", R"(\S+)", "(?<!a)b", R"(\-)"}) {
    EXPECT_NO_THROW(SplitPattern(pattern, Syntax::kOniguruma, "t")) << pattern;
  }
}

TEST(SplitPattern, LinesEndAsInTheLibraryOfThePattern) {
  MatchScratch scratch;
  const auto matches = [&](const char* pattern, SplitPattern::Syntax syntax, const char* text) {
    return SplitPattern(pattern, syntax, "t").find(text, 0, false, scratch).kind ==
           SplitPattern::Match::Kind::kFound;
  };
  EXPECT_TRUE(matches("a$", SplitPattern::Syntax::kOniguruma, "a\nb"));
  EXPECT_FALSE(matches("a$", SplitPattern::Syntax::kRust, "a\nb"));
  EXPECT_FALSE(matches("a$", SplitPattern::Syntax::kRust, "a\n"));
  EXPECT_FALSE(matches(R"(\s)", SplitPattern::Syntax::kRust, "\xe1\xa0\x8e"));  // U+180E
  // U+3001 is used with Han, but is not of that script.
  EXPECT_FALSE(matches(R"(\p{Han})", SplitPattern::Syntax::kRust, "\xe3\x80\x81"));
}

// Splits a text as a tokenizer does: by all matches, within the time that a text of so many bytes
// has.
Thrown split_by(const std::string& pattern, const std::string& text, size_t time_bytes = 0) {
  std::vector<PreTokenizer::Stage> stages;
  stages.push_back({SplitPattern(pattern, SplitPattern::Syntax::kOniguruma, "hostile.json")});
  const PreTokenizer pieces(std::move(stages));
  MatchScratch scratch;
  scratch.begin_text(time_bytes);
  return thrown_by([&] { pieces.split(text, false, scratch, [](std::string_view) {}); });
}

// The first takes time with each match, the second within one, the third without an end. The fourth
// lets PCRE2's compiled code run for long without anything that it counts.
TEST(SplitPattern, APatternThatTakesTooLongIsAnError) {
  const std::string text(200000, 'a');
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"(?=[^x]*x)a|a", text},
      {"(?:(?=[^x]*x)a|a)+b|a", text},
      {"(?:a|aa|a?a)+b", std::string(60, 'a') + "cb"},
      {R"(\p{L}*[^y]*y|a)", text}};
  for (const auto& [pattern, hostile] : cases) {
    const auto start = std::chrono::steady_clock::now();
    const Thrown thrown = split_by(pattern, hostile);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    EXPECT_EQ(thrown.code, ExitCode::kData) << pattern;
    EXPECT_TRUE(thrown.says("hostile.json") && thrown.says(pattern) && thrown.says("more than"))
        << thrown.message;
    EXPECT_LT(seconds.count(), 60) << pattern;  // a few where nothing else runs
  }
}

// Groups that a pattern nests and repeats would each take memory for every character.
TEST(SplitPattern, APatternThatTakesTooMuchMemoryIsAnError) {
  const std::string open = "((((((((((((((((((((";
  const std::string close(open.size(), ')');
  const std::string pattern = "(?:" + open + "a" + close + "|b)+c|[ab]";
  const std::string text(1000000, 'a');
  const Thrown thrown = split_by(pattern, text, text.size());
  EXPECT_EQ(thrown.code, ExitCode::kData);
  EXPECT_TRUE(thrown.says("hostile.json") && thrown.says("64 MiB")) << thrown.message;
}

// What the quick code gives up, the careful one finds.
TEST(SplitPattern, AMatchOfManyTriesIsFound) {
  const SplitPattern pattern("[A-Z]*[A-Z]+x|[A-Z]+|(?:ab)+", SplitPattern::Syntax::kRust, "t");
  MatchScratch scratch;
  std::string text(20000, 'A');
  for (int i = 0; i < 100000; ++i) text += "ab";
  const SplitPattern::Match capitals = pattern.find(text, 0, false, scratch);
  EXPECT_EQ(capitals.kind, SplitPattern::Match::Kind::kFound);
  EXPECT_EQ(capitals.begin, 0u);
  EXPECT_EQ(capitals.end, 20000u);
  const SplitPattern::Match pairs = pattern.find(text, capitals.end, false, scratch);
  EXPECT_EQ(pairs.begin, 20000u);
  EXPECT_EQ(pairs.end, text.size());
  EXPECT_EQ(pattern.find(text, capitals.end, true, scratch).kind,
            SplitPattern::Match::Kind::kUndecided);
}

TEST(Nfc, ComposesAndOrders) {
  EXPECT_EQ(to_nfc("e\xcc\x81").text, "\xc3\xa9");
  EXPECT_EQ(to_nfc("a\xcc\x81\xcc\xa3").text, "\xe1\xba\xa1\xcc\x81");  // marks change places
  EXPECT_EQ(to_nfc("\xe1\x84\x80\xe1\x85\xa1\xe1\x86\xa8").text, "\xea\xb0\x81");  // Hangul
  EXPECT_EQ(to_nfc("\xe2\x84\xab").text, "\xc3\x85");                              // Angstrom sign
  EXPECT_EQ(to_nfc("\xef\xac\x81").text, "\xef\xac\x81");  // ligatures stay: no compatibility form
  const NfcText text = to_nfc("abe\xcc\x81 c");
  ASSERT_EQ(text.segments.size(), 3u);
  EXPECT_EQ(text.segments[1].original, 2u);
  EXPECT_EQ(text.segments[2].original, 5u);
  EXPECT_EQ(text.segments[2].normalized, 4u);
}

// ---- Training

using Ids = std::vector<int32_t>;

// The definition of byte-pair encoding, which counts all pairs anew for each merge: the tokens of
// every piece of the texts after `merges` merges, and the bytes of all tokens.
std::vector<std::string> naive_bpe(const std::vector<std::string>& texts, size_t merges) {
  std::vector<PreTokenizer::Stage> stages;
  stages.push_back({SplitPattern(kLlama3Pattern, SplitPattern::Syntax::kOniguruma, "naive")});
  const PreTokenizer pieces(std::move(stages));
  MatchScratch scratch;
  std::map<std::string, int64_t> counts;
  for (const std::string& text : texts) {
    pieces.split(text, false, scratch, [&](std::string_view p) { ++counts[std::string(p)]; });
  }
  std::vector<std::string> tokens;
  for (int byte = 0; byte < 256; ++byte) tokens.emplace_back(1, static_cast<char>(byte));
  std::vector<std::pair<Ids, int64_t>> words;
  for (const auto& [piece, count] : counts) {
    words.emplace_back(Ids{}, count);
    for (const char c : piece) words.back().first.push_back(static_cast<unsigned char>(c));
  }
  while (merges-- > 0) {
    std::map<std::pair<int32_t, int32_t>, int64_t> pairs;
    for (const auto& [ids, count] : words) {
      for (size_t i = 0; i + 1 < ids.size(); ++i) pairs[{ids[i], ids[i + 1]}] += count;
    }
    const auto best =
        std::max_element(pairs.begin(), pairs.end(),
                         [](const auto& a, const auto& b) { return a.second < b.second; });
    const auto [left, right] = best->first;
    const auto merged = static_cast<int32_t>(tokens.size());
    tokens.push_back(tokens[static_cast<size_t>(left)] + tokens[static_cast<size_t>(right)]);
    for (auto& [ids, count] : words) {
      for (size_t i = 0; i + 1 < ids.size(); ++i) {
        if (ids[i] != left || ids[i + 1] != right) continue;
        ids[i] = merged;
        ids.erase(ids.begin() + static_cast<int64_t>(i) + 1);
      }
    }
  }
  return tokens;
}

TEST_F(Bpe, TrainingMergesTheMostFrequentPairs) {
  // Short lines, so that none is cut.
  std::vector<std::string> texts;
  for (const std::string& text : english_texts()) {
    for (size_t at = 0; at < text.size();) {
      const size_t end = std::min(text.find('\n', at), text.size() - 1) + 1;
      texts.push_back(text.substr(at, end - at));
      at = end;
    }
  }
  texts.resize(600);
  texts.emplace_back("aaaa aaaaaaa aaa\n\n\n\n  \xc3\xa9\xc3\xa9 123456");
  size_t given = 0;
  const TokenizerTraining options = {.type = TokenizerType::kBpe, .vocab = 500};
  train_tokenizer(one_by_one(texts, given), options, path("tokenizer.json"));
  const Tokenizer tokenizer(path("tokenizer.json"));
  ASSERT_EQ(tokenizer.size(), 500);
  EXPECT_EQ(tokenizer.bos(), 498);
  EXPECT_EQ(tokenizer.eos(), 499);
  EXPECT_TRUE(tokenizer.lossless());
  EXPECT_FALSE(tokenizer.adds_bos());
  const std::vector<std::string> expected = naive_bpe(texts, 498 - 256);
  for (int32_t id = 0; id < 498; ++id) {
    EXPECT_EQ(tokenizer.bytes(id), expected[static_cast<size_t>(id)]) << id;
  }
  for (const std::string& text : texts) EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
  given = 0;
  train_tokenizer(one_by_one(texts, given), options, path("again.json"));
  EXPECT_EQ(read_file(path("again.json")), read_file(path("tokenizer.json")));
}

TEST_F(Bpe, TrainingTakesAnyBytesAndRefusesTooLittleText) {
  const std::vector<std::string> texts = {"\xff\xfe ab ab\xc3", "\n\n", "", "ab\xf0\x9f ab"};
  size_t given = 0;
  const std::string file = path("tokenizer.json");
  const Thrown little = thrown_by([&] {
    train_tokenizer(one_by_one(texts, given), {.type = TokenizerType::kBpe, .vocab = 300}, file);
  });
  EXPECT_TRUE(little.code == ExitCode::kUsage && little.says("vocabulary")) << little.message;
  EXPECT_FALSE(fs::exists(file));
  std::vector<std::string> more = texts;
  more.push_back(english_texts().front());
  given = 0;
  train_tokenizer(one_by_one(more, given), {.type = TokenizerType::kBpe, .vocab = 300}, file);
  const Tokenizer tokenizer(file);
  for (const std::string& text : more) EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
}

TEST(Utf8, CompleteLengthKeepsUnfinishedCharacters) {
  EXPECT_EQ(complete_length("ab"), 2u);
  EXPECT_EQ(complete_length("a\xe4\xbd"), 1u);
  EXPECT_EQ(complete_length("a\xe4\xbd\xa0"), 4u);
  EXPECT_EQ(complete_length("\xf0\x9f\x91"), 0u);
  EXPECT_EQ(complete_length("\x80\x80\x80\x80"), 4u);  // never becomes a character
}

}  // namespace
}  // namespace sbtrain::test
