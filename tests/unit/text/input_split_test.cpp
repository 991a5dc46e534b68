// Documents in two files, for training and for validation.
#include <algorithm>

#include "text/text_reader.h"
#include "unit/text/compress.h"
#include "unit/text/input.h"

namespace sbtrain::test {
namespace {

namespace fs = std::filesystem;
using namespace std::string_literals;

class SplitTest : public InputTest {
 protected:
  static constexpr int kDocuments = 400;
  static std::string text(int i) { return "document number " + std::to_string(i); }
  static std::vector<std::string> documents_of(const std::string& file) {
    const DocumentStore store(file);
    std::vector<std::string> texts;
    for (int64_t i = 0; i < store.documents(); ++i) {
      std::vector<int32_t> tokens(static_cast<size_t>(store.length(i)));
      store.read(static_cast<int64_t>(store.offsets()[static_cast<size_t>(i)]), tokens);
      texts.push_back(tokenizer().decode(tokens));
    }
    return texts;
  }
};

TEST_F(SplitTest, EachDocumentIsInOneOfTwoFiles) {
  std::vector<std::string> all;
  for (int i = 0; i < kDocuments; ++i) all.push_back(text(i));
  write_file(path("all.jsonl"), json_lines(all));
  PrepareOptions options{.inputs = {path("all.jsonl")}, .output = path("all.h5"), .split = 0.2};
  const PreparedStores stores = prepare_documents(options, &tokenizer(), {});
  ASSERT_TRUE(stores.validation);
  EXPECT_NEAR(static_cast<double>(stores.validation->documents), 0.2 * kDocuments, 40);
  const std::vector<std::string> train = documents_of(path("all.h5"));
  const std::vector<std::string> held = documents_of(path("all.validation.h5"));
  std::vector<std::string> both = train;
  both.insert(both.end(), held.begin(), held.end());
  std::sort(both.begin(), both.end());
  std::sort(all.begin(), all.end());
  EXPECT_EQ(both, all);
  EXPECT_EQ(stores.store.text_bytes + stores.validation->text_bytes,
            static_cast<int64_t>(
                std::accumulate(all.begin(), all.end(), size_t{0},
                                [](size_t sum, const std::string& t) { return sum + t.size(); })));

  // In another order, twice, and in other files and formats, the same documents are held out.
  std::reverse(all.begin(), all.end());
  write_file(path("again.jsonl.gz"), gzip(json_lines(all)));
  fs::create_directories(path("texts"));
  for (int i = 0; i < kDocuments; ++i) {
    write_file(path(fmt::format("texts/{}.txt", i)), text(i));
  }
  options.inputs = {path("again.jsonl.gz"), path("texts")};
  prepare_documents(options, &tokenizer(), {});
  const std::vector<std::string> twice = documents_of(path("all.validation.h5"));
  EXPECT_EQ(twice.size(), 2 * held.size());
  EXPECT_EQ(std::set<std::string>(twice.begin(), twice.end()),
            std::set<std::string>(held.begin(), held.end()));
}

TEST_F(SplitTest, ALongTextGoesWhereItsBeginningSends) {
  std::string long_text = "short line\n";
  while (long_text.size() < kTextPartBytes + 1000) long_text += "no newline in the rest of it ";
  for (int i = 0; i < 4; ++i) {
    const std::string content = std::to_string(i) + long_text;
    write_file(path("long.txt"), content);
    write_file(path("long.jsonl"), json_lines({content, content + "different end"}));
    write_file(path("rest.jsonl"), json_lines({"a", "b", "c", "d", "e", "f", "g", "h"}));
    std::set<bool> held;
    for (const char* name : {"long.txt", "long.jsonl"}) {
      PrepareOptions options{
          .inputs = {path(name), path("rest.jsonl")}, .output = path("l.h5"), .split = 0.5};
      const PreparedStores stores = prepare_documents(options, &tokenizer(), {});
      held.insert(stores.validation->text_bytes > stores.store.text_bytes);
    }
    EXPECT_EQ(held.size(), 1U) << i;
  }
}

TEST_F(SplitTest, BothFilesAppearOrNone) {
  write_file(path("one.jsonl"), json_lines({text(0)}));
  PrepareOptions options{.inputs = {path("one.jsonl")}, .output = path("two.h5"), .split = 0.5};
  const Thrown error = thrown_by([&] { prepare_documents(options, &tokenizer(), {}); });
  EXPECT_EQ(error.code, ExitCode::kUsage);
  EXPECT_TRUE(error.says("split")) << error.message;
  std::vector<std::string> all;
  for (int i = 0; i < 20; ++i) all.push_back(text(i));
  write_file(path("one.jsonl"), json_lines(all) + "not JSON\n");
  EXPECT_EQ(thrown_by([&] { prepare_documents(options, &tokenizer(), {}); }).code, ExitCode::kData);
  for (const char* name : {"two.h5", "two.h5.tmp", "two.validation.h5", "two.validation.h5.tmp"}) {
    EXPECT_FALSE(fs::exists(path(name))) << name;
  }
  // The sibling is an output like the other: it replaces no input and no folder.
  write_file(path("two.validation.h5"), json_lines(all));
  options.inputs = {path("two.validation.h5")};
  EXPECT_EQ(thrown_by([&] { prepare_documents(options, &tokenizer(), {}); }).code,
            ExitCode::kUsage);
  EXPECT_EQ(read_file(path("two.validation.h5")), json_lines(all));
}

}  // namespace
}  // namespace sbtrain::test
