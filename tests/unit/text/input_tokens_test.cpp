// Documents that come as tokens.
#include "text/text_reader.h"
#include "unit/text/input.h"

namespace sbtrain::test {
namespace {

namespace fs = std::filesystem;
using namespace std::string_literals;

TEST_F(InputTest, LongDocumentsOfTokensStayWhole) {
  std::vector<uint16_t> tokens;
  for (size_t i = 0; i < 3 * kTextPartBytes / 2 + 7; ++i) {
    tokens.push_back(static_cast<uint16_t>(10 + i % 600));
  }
  const size_t length = tokens.size();
  tokens.push_back(2);
  tokens.insert(tokens.end(), kTextPartBytes / 2, 7);  // ends where a part ends
  tokens.push_back(2);
  tokens.push_back(2);
  tokens.push_back(9);
  write_file(path("long.bin"), token_bytes(tokens));
  PrepareOptions options{.inputs = {path("long.bin")}, .output = path("long.h5"), .vocab = 700};
  options.input = {.format = InputFormat::kNanoGpt, .end_of_text = 2};
  const StoreInfo info = prepare_documents(options, nullptr, {}).store;
  EXPECT_EQ(info.tokenizer_hash, "");
  EXPECT_EQ(info.eos, 2);
  const DocumentStore store(path("long.h5"));
  ASSERT_EQ(store.documents(), 3);
  EXPECT_EQ(store.length(0), static_cast<int64_t>(length) + 1);
  EXPECT_EQ(store.length(1), static_cast<int64_t>(kTextPartBytes / 2) + 1);
  EXPECT_EQ(store.length(2), 2);
  std::vector<int32_t> read(length + 1);
  store.read(0, read);
  EXPECT_TRUE(std::equal(read.begin(), read.end(), tokens.begin()));
  // Without an id between documents a file is one document, as it is.
  options.input.end_of_text = -1;
  EXPECT_EQ(prepare_documents(options, nullptr, {}).store.documents, 1);
  EXPECT_EQ(DocumentStore(path("long.h5")).tokens(), static_cast<int64_t>(tokens.size()));
}

TEST_F(InputTest, TokensThatCannotBeAreRefused) {
  PrepareOptions nanogpt;
  nanogpt.input.format = InputFormat::kNanoGpt;
  const Thrown beyond = refusal_of("b.bin", token_bytes<uint16_t>({5, 6, 700, 7}), nanogpt);
  EXPECT_EQ(beyond.code, ExitCode::kData);
  EXPECT_TRUE(beyond.says("token 2 is 700") && beyond.says("vocabulary of 700")) << beyond.message;
  EXPECT_TRUE(refusal_of("odd.bin", "\x05\0\x06"s, nanogpt).says("inside of a token"));
  EXPECT_TRUE(refusal_of("plain.bin", "\x05\0\x06\0"s).says("--format nanogpt"));
  const std::string three = token_bytes<uint16_t>({5, 6, 7});
  for (const int declared : {2, 4, -1}) {
    const Thrown error =
        refusal_of("c.bin", llmc_header(20240520, 1, static_cast<size_t>(declared)) + three);
    EXPECT_EQ(error.code, ExitCode::kData) << declared << error.message;
    EXPECT_TRUE(error.says("header")) << error.message;
  }
  EXPECT_TRUE(refusal_of("v.bin", llmc_header(20240520, 2, 3) + three).says("binary"));
  EXPECT_TRUE(refusal_of("h.bin", llmc_header(20240520, 1, 3).substr(0, 900)).says("header"));
  EXPECT_TRUE(refusal_of("n.bin", llmc_header(20240520, 1, 3) + three, nanogpt).says("llm.c"));
}

TEST_F(InputTest, WithoutATokenizerOnlyTokensOfAKnownVocabularyAreRead) {
  write_file(path("t.txt"), "text");
  EXPECT_EQ(refusal(path("t.txt"), {}, false).code, ExitCode::kUsage);
  write_file(path("n.bin"), token_bytes<uint16_t>({5, 6}));
  PrepareOptions nanogpt;
  nanogpt.input.format = InputFormat::kNanoGpt;
  EXPECT_TRUE(refusal(path("n.bin"), nanogpt, false).says("--vocab"));
  nanogpt.vocab = 100;
  nanogpt.input.end_of_text = 100;
  EXPECT_TRUE(refusal(path("n.bin"), nanogpt, false).says("--eot 100"));
  write_file(path("g.bin"), llmc_header(20240520, 1, 3) + token_bytes<uint16_t>({50256, 6, 50000}));
  PrepareOptions options{.inputs = {path("g.bin")}, .output = path("g.h5")};
  const StoreInfo info = prepare_documents(options, nullptr, {}).store;
  EXPECT_EQ(info.vocab, 50257);
  EXPECT_EQ(info.tokens, 3);  // 6, 50000 and the end of text
  EXPECT_EQ(info.eos, 50256);
}

}  // namespace
}  // namespace sbtrain::test
