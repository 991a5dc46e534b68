#include "data/prepare.h"

#include <filesystem>

#include "text/text_reader.h"
#include "unit/data/stores.h"

namespace sbtrain::test {
namespace {

namespace fs = std::filesystem;

class PrepareTest : public EnglishTest {
 protected:
  static StoreInfo prepare(const PrepareOptions& options) {
    return prepare_documents(options, &tokenizer(), {}).store;
  }
};

TEST_F(PrepareTest, RealTextComesBackExactly) {
  const StoreInfo info = prepare({.inputs = {english_path()}, .output = path("english.h5")});
  const DocumentStore store(path("english.h5"));
  const std::vector<std::string> texts = english_texts();
  ASSERT_EQ(store.documents(), static_cast<int64_t>(texts.size()));
  EXPECT_EQ(store.info().tokenizer_hash, tokenizer().hash());
  int64_t bytes = 0;
  for (size_t i = 0; i < texts.size(); ++i) {
    std::vector<int32_t> tokens(static_cast<size_t>(store.length(static_cast<int64_t>(i))));
    store.read(static_cast<int64_t>(store.offsets()[i]), tokens);
    EXPECT_EQ(tokenizer().decode(tokens), texts[i]);
    EXPECT_EQ(tokens.back(), tokenizer().eos());
    bytes += static_cast<int64_t>(texts[i].size());
  }
  EXPECT_EQ(info.text_bytes, bytes);
  ASSERT_EQ(info.sources.size(), 1u);
  EXPECT_EQ(info.sources[0].name, "python-tutorial");
  EXPECT_EQ(info.sources[0].tokens, info.tokens);
}

TEST_F(PrepareTest, SameFileForAnyNumberOfThreads) {
  const std::vector<std::string> texts = english_texts();
  fs::create_directories(path("many"));
  std::string lines;
  for (int i = 0; i < 400; ++i) {
    const std::string& text = texts[static_cast<size_t>(i) % texts.size()];
    std::string part = text.substr(static_cast<size_t>(i) * 7 % 3000, 500 + 37 * (i % 50));
    part.erase(0, part.find(' '));  // no file may begin or end inside a character
    part.erase(part.rfind(' '));
    write_file(path(fmt::format("many/{:03}.txt", i)), part);
  }
  fs::create_directories(path("many/below"));
  fs::copy_file(english_path(), path("many/below/e.jsonl"));
  prepare({.inputs = {path("many")}, .output = path("one.h5"), .threads = 1});
  for (const int threads : {2, 7}) {
    prepare({.inputs = {path("many")}, .output = path("more.h5"), .threads = threads});
    EXPECT_TRUE(read_file(path("more.h5")) == read_file(path("one.h5"))) << threads;
  }
  EXPECT_EQ(DocumentStore(path("one.h5")).documents(), 400 + static_cast<int64_t>(texts.size()));
}

TEST_F(PrepareTest, LongFilesComeInPartsWithTheTokensOfTheWhole) {
  std::string text;
  const std::vector<std::string> texts = english_texts();
  for (size_t i = 0; text.size() < 5 * kTextPartBytes; ++i) text += texts[i % texts.size()];
  write_file(path("long.txt"), text);
  write_file(path("exact.txt"), text.substr(0, 2 * kTextPartBytes));
  write_file(path("short.txt"), "after it");
  const StoreInfo info =
      prepare({.inputs = {path("long.txt"), path("exact.txt"), path("short.txt")},
               .output = path("long.h5"),
               .bos = true});
  EXPECT_EQ(info.documents, 3);
  EXPECT_EQ(info.sources[0].documents, 1);
  const DocumentStore store(path("long.h5"));
  const std::vector<std::string> expected = {text, text.substr(0, 2 * kTextPartBytes), "after it"};
  for (int64_t i = 0; i < 3; ++i) {
    std::vector<int32_t> tokens(static_cast<size_t>(store.length(i)));
    store.read(static_cast<int64_t>(store.offsets()[static_cast<size_t>(i)]), tokens);
    std::vector<int32_t> whole = tokenizer().encode(expected[static_cast<size_t>(i)]);
    whole.insert(whole.begin(), tokenizer().bos());
    whole.push_back(tokenizer().eos());
    EXPECT_TRUE(tokens == whole) << i;
  }
}

TEST_F(PrepareTest, BosAndEosAreOptions) {
  write_file(path("x.txt"), "some text");
  prepare({.inputs = {path("x.txt")}, .output = path("x.h5"), .bos = true, .eos = false});
  const DocumentStore store(path("x.h5"));
  std::vector<int32_t> tokens(static_cast<size_t>(store.tokens()));
  store.read(0, tokens);
  EXPECT_EQ(tokens.front(), tokenizer().bos());
  EXPECT_NE(tokens.back(), tokenizer().eos());
  EXPECT_TRUE(store.info().starts_with_bos);
  EXPECT_FALSE(store.info().ends_with_eos);
}

// Also where a document comes in parts, of which the first ones are shorter.
TEST_F(PrepareTest, ShortDocumentsAreLeftOut) {
  std::string text;
  const std::vector<std::string> texts = english_texts();
  for (size_t i = 0; text.size() < 3 * kTextPartBytes; ++i) text += texts[i % texts.size()];
  write_file(path("long.txt"), text);
  write_file(path("short.txt"), texts[0].substr(0, 2000));
  write_file(path("a.txt"), "a");
  const auto count = [&](int64_t min_tokens, PrepareProgress& last) {
    const PrepareOptions options{
        .inputs = {path("a.txt"), path("long.txt"), path("short.txt"), path("a.txt")},
        .output = path("min.h5"),
        .min_tokens = min_tokens};
    return prepare_documents(options, &tokenizer(),
                             [&](const PrepareProgress& progress) {
                               last = progress;
                               return true;
                             })
        .store;
  };
  PrepareProgress progress;
  const StoreInfo all = count(0, progress);
  EXPECT_EQ(all.documents, 4);
  EXPECT_EQ(progress.too_short, 0);
  const DocumentStore store(path("min.h5"));
  const int64_t longest = store.length(1);
  const int64_t shorter = store.length(2);
  std::vector<int32_t> tokens(static_cast<size_t>(longest));
  store.read(static_cast<int64_t>(store.offsets()[1]), tokens);
  EXPECT_EQ(count(shorter, progress).documents, 2);
  const StoreInfo one = count(longest, progress);
  EXPECT_EQ(one.documents, 1);
  EXPECT_EQ(one.tokens, longest);
  EXPECT_EQ(one.text_bytes, static_cast<int64_t>(text.size()));
  EXPECT_EQ(progress.too_short, 3);
  EXPECT_EQ(progress.documents, 1);
  EXPECT_EQ(progress.tokens, longest);
  std::vector<int32_t> kept(tokens.size());
  DocumentStore(path("min.h5")).read(0, kept);
  EXPECT_TRUE(kept == tokens);
  const Thrown error = thrown_by([&] { count(longest + 1, progress); });
  EXPECT_EQ(error.code, ExitCode::kUsage);
  EXPECT_TRUE(error.says(fmt::format("no document has {} tokens", longest + 1))) << error.message;
  EXPECT_TRUE(error.says(fmt::format("the longest of 4 has {}", longest))) << error.message;
}

TEST_F(PrepareTest, NamesTheBadLine) {
  const std::string file = path("bad.jsonl");
  for (const char* bad : {"{\"text\": ", "{\"txt\": \"a\"}", "[1]", "{\"text\": 7}", "\xff"}) {
    write_file(file, "{\"text\": \"good\"}\n\n" + std::string(bad) + "\n");
    const Thrown error = thrown_by([&] { prepare({.inputs = {file}, .output = path("bad.h5")}); });
    EXPECT_EQ(error.code, ExitCode::kData);
    EXPECT_TRUE(error.says("bad.jsonl:3")) << error.message;
    EXPECT_FALSE(fs::exists(path("bad.h5")));
  }
}

TEST_F(PrepareTest, RefusesNothing) {
  const auto code = [&](const std::string& input) {
    return thrown_by([&] { prepare({.inputs = {input}, .output = path("n.h5")}); }).code;
  };
  EXPECT_EQ(code(path("missing.txt")), ExitCode::kUsage);
  fs::create_directories(path("empty"));
  EXPECT_EQ(code(path("empty")), ExitCode::kUsage);
  write_file(path("blank.jsonl"), "\n{\"text\": \"\"}\n");
  EXPECT_EQ(code(path("blank.jsonl")), ExitCode::kUsage);
  EXPECT_FALSE(fs::exists(path("n.h5")));
  EXPECT_FALSE(fs::exists(path("n.h5.tmp")));
}

TEST_F(PrepareTest, AnInterruptLeavesNothingBehind) {
  for (const int reports : {0, 1, 2}) {
    const PrepareOptions options{.inputs = {english_path()}, .output = path("i.h5"), .split = 0.3};
    int report = 0;
    EXPECT_THROW(
        prepare_documents(options, &tokenizer(), [&](const auto&) { return report++ < reports; }),
        Interrupted);
    for (const char* name : {"i.h5", "i.h5.tmp", "i.validation.h5", "i.validation.h5.tmp"}) {
      EXPECT_FALSE(fs::exists(path(name))) << name;
    }
  }
}

TEST_F(PrepareTest, AnInterruptAtOnceLeavesNothingBehind) {
  const PrepareOptions options{.inputs = {english_path()}, .output = path("i.h5")};
  EXPECT_THROW(prepare_documents(options, &tokenizer(), [](const auto&) { return false; }),
               Interrupted);
  EXPECT_FALSE(fs::exists(path("i.h5")));
  EXPECT_FALSE(fs::exists(path("i.h5.tmp")));
  EXPECT_FALSE(fs::exists(path("i.h5.tokens.tmp")));
}

}  // namespace
}  // namespace sbtrain::test
