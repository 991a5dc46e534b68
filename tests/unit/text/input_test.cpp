// Every format that `sbtrain prepare` reads, whole and damaged.
#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/python.h"
#include "core/utf8.h"
#include "data/prepare.h"
#include "text/text_reader.h"
#include "unit/data/stores.h"
#include "unit/text/compress.h"

namespace sbtrain::test {
namespace {

namespace fs = std::filesystem;
using namespace std::string_literals;

std::string utf8(const char8_t* text) {
  return reinterpret_cast<const char*>(text);
}

class InputTest : public EnglishTest {
 protected:
  // Texts with everything that a format might change.
  static std::vector<std::string> texts() {
    std::vector<std::string> texts = english_texts();
    texts.push_back(utf8(u8"caf\u00e9 \u4e2d\u6587 \U0001f600\r\n\ttab\u0000nul "s.c_str()));
    texts.push_back("a\0b"s);
    texts.push_back("{\"text\": \"JSON in text\"}");
    return texts;
  }

  static std::string json_lines(const std::vector<std::string>& texts) {
    std::string lines;
    for (const std::string& text : texts) lines += nlohmann::json{{"text", text}}.dump() + "\n";
    return lines;
  }

  // The store of the file, as bytes.
  static std::string store_of(const std::string& file, PrepareOptions options = {},
                              bool with_tokenizer = true) {
    options.inputs = {file};
    options.output = path("store.h5");
    prepare_documents(options, with_tokenizer ? &tokenizer() : nullptr, {});
    return read_file(options.output);
  }

  static Thrown refusal(const std::string& file, PrepareOptions options = {},
                        bool with_tokenizer = true) {
    fs::remove(path("store.h5"));
    Thrown error = thrown_by([&] { store_of(file, std::move(options), with_tokenizer); });
    EXPECT_FALSE(fs::exists(path("store.h5")) || fs::exists(path("store.h5.tmp"))) << file;
    return error;
  }
  static Thrown refusal_of(const std::string& name, const std::string& content,
                           const PrepareOptions& options = {}) {
    write_file(path(name), content);
    Thrown error = refusal(path(name), options);
    EXPECT_TRUE(error.says(name)) << error.message;
    fs::remove(path(name));
    return error;
  }

  template <typename Token>
  static std::string token_bytes(const std::vector<Token>& tokens) {
    return {reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(Token)};
  }
  static std::string llmc_header(int32_t magic, int32_t version, size_t tokens) {
    std::vector<int32_t> header(256);
    header[0] = magic;
    header[1] = version;
    header[2] = static_cast<int32_t>(tokens);
    return token_bytes(header);
  }
};

TEST_F(InputTest, EveryFormatGivesTheSameStore) {
  const std::string lines = json_lines(texts());
  const size_t half = lines.size() / 2;
  std::vector<uint16_t> at_end;
  std::vector<uint32_t> at_start;
  for (const std::string& text : texts()) {
    at_start.push_back(static_cast<uint32_t>(tokenizer().eos()));
    for (const int32_t token : tokenizer().encode(text)) {
      at_end.push_back(static_cast<uint16_t>(token));
      at_start.push_back(static_cast<uint32_t>(token));
    }
    at_end.push_back(static_cast<uint16_t>(tokenizer().eos()));
  }
  const std::string skippable = "\x50\x2a\x4d\x18\x04\0\0\0skip"s;
  const std::vector<std::pair<std::string, std::string>> files = {
      {"t.ndjson", lines},
      {"t.json", lines},
      {"t", lines},
      {"t.jsonl.gz", gzip(lines)},
      {"t.json.gzip", gzip(lines, "../../etc/passwd")},
      {"t.jsonl", gzip(lines.substr(0, half)) + gzip("") + gzip(lines.substr(half))},
      {"t.gz", gzip(lines) + std::string(1000, '\0')},
      {"t.jsonl.zst", zstd(lines)},
      {"t.data", skippable + zstd(lines.substr(0, half)) + skippable + zstd(lines.substr(half))},
      {"t.zst", gzip(lines)},
      {"t.llmc.bin", llmc_header(20240520, 1, at_end.size()) + token_bytes(at_end)},
      {"t.bin", llmc_header(20240801, 7, at_start.size()) + token_bytes(at_start)},
      {"t.bin.gz", gzip(llmc_header(20240801, 7, at_start.size()) + token_bytes(at_start))},
      {"t.nanogpt", token_bytes(at_end)},
      {"t.nanogpt.zst", zstd(token_bytes(at_end))}};
  fs::create_directories(path("in"));
  write_file(path("in/t.jsonl"), lines);
  const std::string expected = store_of(path("in/t.jsonl"));
  for (const auto& [name, content] : files) {
    // The name of the file, up to its extension, is the source in the store.
    std::string file = path("in/t" + name.substr(name.rfind("t.") == 0 ? 1 : name.size()));
    PrepareOptions options;
    if (name.find("bin") != std::string::npos) {
      file = path("in/t.bin" + std::string(name.ends_with(".gz") ? ".gz" : ""));
      options.input.end_of_text = tokenizer().eos();
    }
    if (name.find("nanogpt") != std::string::npos) options.input.format = InputFormat::kNanoGpt;
    write_file(file, content);
    EXPECT_TRUE(store_of(file, options) == expected) << name;
    fs::remove(file);
  }
}

TEST_F(InputTest, CompressedTextIsTheText) {
  std::string text;
  for (size_t i = 0; text.size() < 2 * kTextPartBytes; ++i) text += texts()[i % 4];
  write_file(path("long.txt"), text);
  const std::string expected = store_of(path("long.txt"));
  for (const auto& [suffix, content] : {std::pair(".gz", gzip(text)), {".zst", zstd(text)}}) {
    write_file(path("long.txt"s + suffix), content);
    EXPECT_TRUE(store_of(path("long.txt"s + suffix)) == expected) << suffix;
  }
}

TEST_F(InputTest, DamagedArchivesAreRefused) {
  const std::string lines = json_lines(english_texts());
  for (const auto& [format, content] : {std::pair("gzip"s, gzip(lines)), {"zstd"s, zstd(lines)}}) {
    for (const size_t bytes : {size_t{4}, size_t{9}, size_t{30}, content.size() / 2,
                               content.size() - 9, content.size() - 1}) {
      const Thrown error = refusal_of("cut.jsonl", content.substr(0, bytes));
      EXPECT_EQ(error.code, ExitCode::kData) << bytes << error.message;
      EXPECT_TRUE(error.says(format) && error.says("cut short")) << bytes << error.message;
    }
    const Thrown followed = refusal_of("more.jsonl", content + "more");
    EXPECT_EQ(followed.code, ExitCode::kData) << followed.message;
    EXPECT_TRUE(followed.says(format)) << followed.message;
    std::string damaged = content;
    damaged[content.size() / 2] = static_cast<char>(~damaged[content.size() / 2]);
    damaged[content.size() / 2 + 1] = static_cast<char>(~damaged[content.size() / 2 + 1]);
    EXPECT_EQ(refusal_of("bits.jsonl", damaged).code, ExitCode::kData) << format;
  }
}

TEST_F(InputTest, WhatACompressedFileMayHoldIsWhatAFileMayHold) {
  const std::string tar = std::string(257, 'x') + "ustar" + std::string(300, 'x');
  for (const auto& [content, says] : {std::pair(gzip("a text"), "gzip"),
                                      {tar, "tar"},
                                      {"PK\x03\x04"s, "zip"},
                                      {"PAR1xxxxxxxxxxxx"s, "Parquet"},
                                      {"some \0 text"s, "binary"},
                                      {"caf\xe9 au lait"s, "UTF-8"}}) {
    for (const std::string& packed : {gzip(content), zstd(content)}) {
      const Thrown error = refusal_of("packed.txt.gz", packed);
      EXPECT_EQ(error.code, ExitCode::kData) << says;
      EXPECT_TRUE(error.says(says)) << error.message;
    }
  }
}

// Under a name that promises text, compressed and plain.
TEST_F(InputTest, OtherFormatsAreRefusedByTheirNames) {
  const std::string rest = "\0\1\2\3 and what follows\n"s;
  const std::vector<std::pair<std::string, std::string>> formats = {
      {"\x89PNG\r\n\x1a\n", "PNG"},
      {"\xff\xd8\xff\xe0", "JPEG"},
      {"GIF89a", "GIF"},
      {"GIF87a", "GIF"},
      {"%PDF-1.7", "PDF"},
      {"\x7f"
       "ELF\2\1\1",
       "ELF"},
      {"\x80\x04\x95", "pickle"},
      {"\x80\x02}q", "pickle"},
      {"\x58\0\0\0\0\0\0\0{\"w\":{}}"s, "safetensors"},
      {"GGUF\3\0\0\0"s, "GGUF"},
      {"\x89HDF\r\n\x1a\n", "HDF5"},
      {"SQLite format 3\0"s, "SQLite"},
      {std::string(257, 'x') + "ustar", "tar"},
      {"PK\x03\x04", "zip"},
      {"\xfd"
       "7zXZ\0"s,
       "xz"},
      {"BZh91AY&SY", "bzip2"},
      {"7z\xbc\xaf\x27\x1c", "7z"},
      {"\x93NUMPY", "NumPy"},
      {"ARROW1\0\0"s, "Arrow"},
      {"\x04\x22\x4d\x18", "lz4"}};
  for (const auto& [head, says] : formats) {
    for (const char* name : {"picture.txt", "lines.jsonl", "unnamed"}) {
      const Thrown error = refusal_of(name, head + rest);
      EXPECT_EQ(error.code, ExitCode::kData) << says;
      EXPECT_TRUE(error.says(says)) << error.message;
    }
    EXPECT_TRUE(refusal_of("packed.txt.gz", gzip(head + rest)).says(says)) << says;
  }
  // Words that begin like a format are words.
  for (const char* text : {"GGUF is a format", "PNG, JPEG and ELF", "GIF files", "a,b\n1,2\n"}) {
    write_file(path("words.csv"), text);
    EXPECT_FALSE(store_of(path("words.csv")).empty()) << text;
  }
}

TEST_F(InputTest, NamesThatPromiseAnotherFormatAreRefused) {
  for (const char* name : {"a.txt.gz", "a.jsonl.zst", "a.parquet"}) {
    const Thrown error = refusal_of(name, "{\"text\": \"an error page\"}\n");
    EXPECT_EQ(error.code, ExitCode::kData) << name;
    EXPECT_TRUE(error.says("name")) << error.message;
  }
}

TEST_F(InputTest, ABombIsRefused) {
  std::string much;
  while (much.size() < size_t{1} << 20) much += "words and more words\n";
  std::string members;
  std::string frames;
  for (int i = 0; i < 16; ++i) {
    members += gzip(much, "", 9);
    frames += zstd(much);
  }
  for (const std::string& bomb : {members, frames}) {
    for (const char* name : {"bomb.txt", "bomb.jsonl"}) {
      write_file(path(name), bomb);
      size_t bytes = 0;
      const Thrown error = thrown_by([&] {
        TextInput input({path(name)});
        for (RawDocument raw; input.next(raw);) bytes += raw.data.size();
      });
      EXPECT_EQ(error.code, ExitCode::kData);
      EXPECT_TRUE(error.says(name) && error.says("250 times")) << error.message;
      EXPECT_LT(bytes, size_t{10} << 20);
    }
  }
}

TEST_F(InputTest, AByteOrderMarkIsNoText) {
  const std::string mark = utf8(u8"\ufeff");
  std::string lines;  // some parts of a file long
  while (lines.size() < 2 * kTextPartBytes) lines += "a line with \xc3\xa9 in it " + mark + "\n";
  for (const std::string& text : {"A text."s, lines, std::string(kTextPartBytes, 'x')}) {
    write_file(path("marked.txt"), text);
    const std::string expected = store_of(path("marked.txt"));
    write_file(path("marked.txt"), mark + text);
    EXPECT_TRUE(store_of(path("marked.txt")) == expected) << text.size();
  }
  write_file(path("marked.jsonl"), "{\"text\": \"a\"}\n");
  const std::string expected = store_of(path("marked.jsonl"));
  write_file(path("marked.jsonl"), mark + "{\"text\": \"a\"}\n");
  EXPECT_TRUE(store_of(path("marked.jsonl")) == expected);
  EXPECT_TRUE(refusal_of("latin.txt", mark + "caf\xe9").says("0xe9 at offset 6"));
}

TEST_F(InputTest, OtherEncodingsAreRefusedWhereverTheyBegin) {
  EXPECT_TRUE(refusal_of("latin.txt", "caf\xe9 au lait").says("0xe9 at offset 3"));
  const std::string plain(300000, 'x');
  EXPECT_TRUE(refusal_of("deep.txt", plain + "\xe9t\xe9").says("0xe9 at offset 300000"));
  EXPECT_TRUE(refusal_of("end.txt", plain + "\xc3").says("0xc3 at offset 300000"));
  const std::string euro = utf8(u8"\u20ac");
  for (size_t before = kFormatBytes - 4; before <= kFormatBytes; ++before) {
    write_file(path("euro.txt"), std::string(before, 'x') + euro + "y");
    EXPECT_FALSE(store_of(path("euro.txt")).empty()) << before;
  }
}

TEST_F(InputTest, Utf8IsThatOfItsDefinition) {
  for (const char8_t* good : {u8"", u8"a", u8"\u0080", u8"\u07ff", u8"\u0800", u8"\ud7ff",
                              u8"\ue000", u8"\uffff", u8"\U00010000", u8"\U0010ffff"}) {
    const std::string text = utf8(good);
    EXPECT_EQ(valid_length(text), text.size());
    EXPECT_EQ(valid_length("12345678" + text + "12345678"), text.size() + 16);
    if (text.size() > 1) {
      EXPECT_EQ(valid_length("12345678" + text.substr(0, text.size() - 1)), 8U);
    }
  }
  for (const char* bad : {"\x80", "\xc0\xaf", "\xc1\xbf", "\xe0\x9f\xbf", "\xed\xa0\x80",
                          "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff"}) {
    EXPECT_EQ(valid_length("123456789"s + bad + "123456789"), 9U);
  }
}

TEST_F(InputTest, JsonLinesAreToldFromOtherJson) {
  for (const char* lines :
       {"{\"text\": \"a\"}", "{\"text\": \"a\"}\n{\"text\": \"b\"}\n", "\n  {\"text\": \"a\"}\n"}) {
    write_file(path("x.json"), lines);
    EXPECT_FALSE(store_of(path("x.json")).empty()) << lines;
  }
  for (const char* other :
       {"{\n  \"text\": \"a\"\n}\n", "[{\"text\": \"a\"}]", "[1]", "3", "{\"a"}) {
    EXPECT_EQ(refusal_of("x.json", other).code, ExitCode::kData) << other;
  }
  PrepareOptions as_text;
  as_text.input.format = InputFormat::kText;
  write_file(path("x.json"), "[1]");
  EXPECT_FALSE(store_of(path("x.json"), as_text).empty());
}

TEST_F(InputTest, KeysChooseTheTextAndTheSource) {
  write_file(path("k.jsonl"),
             "{\"content\": \"one\", \"text\": 3, \"meta\": {\"set\": \"A\", \"l\": [\"x\"]}}\n"
             "{\"meta\": {\"deep\": {\"set\": \"no\"}, \"set\": \"B\"}, \"content\": \"two\"}\n");
  PrepareOptions options{.inputs = {path("k.jsonl")}, .output = path("k.h5")};
  options.input.keys = {.text = "content", .source = "meta.set"};
  const StoreInfo info = prepare_documents(options, &tokenizer(), {}).store;
  ASSERT_EQ(info.sources.size(), 2U);
  EXPECT_EQ(info.sources[0].name, "A");
  EXPECT_EQ(info.sources[1].name, "B");
  EXPECT_EQ(info.text_bytes, 6);
  options.input.keys = {.text = "meta.l"};
  const Thrown error = thrown_by([&] { prepare_documents(options, &tokenizer(), {}); });
  EXPECT_TRUE(error.says("k.jsonl:1") && error.says("\"meta.l\" is no string")) << error.message;
}

TEST_F(InputTest, AFolderIsReadByContentAndSaysWhatItLeavesOut) {
  fs::create_directories(path("mixed/below"));
  write_file(path("mixed/a.jsonl.gz"), gzip("{\"text\": \"a\"}\n"));
  write_file(path("mixed/b.json"), "{\"text\": \"b\"}\n");
  write_file(path("mixed/below/c.txt.zst"), zstd("c"));
  write_file(path("mixed/config.json"), "{\n\"a\": 1}");
  write_file(path("mixed/weights.bin"), std::string(100, '\0'));
  write_file(path("mixed/table.csv"), "a,b\n");
  write_file(path("mixed/x.tar.gz"), gzip("x"));
  write_file(path("mixed/LICENSE"), "x");
  const TextInput input({path("mixed")});
  EXPECT_EQ(input.files().size(), 3U);
  EXPECT_EQ(input.taken(),
            (std::map<std::string, int64_t>{{".jsonl.gz", 1}, {".json", 1}, {".txt.zst", 1}}));
  EXPECT_EQ(input.left_out(), (std::map<std::string, int64_t>{{".json (not JSON lines)", 1},
                                                              {".bin (without llm.c's header)", 1},
                                                              {".csv", 1},
                                                              {".tar.gz", 1},
                                                              {"", 1}}));
}

// ---- tokens

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

// ---- splits

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

// ---- Bad records

TEST_F(InputTest, BadRecordsAreLeftOutOnRequestAlone) {
  const std::vector<std::string> good = texts();
  std::string lines;
  int64_t bad = 0;
  for (size_t i = 0; i < good.size(); ++i) {
    lines += json_lines({good[i]});
    for (const char* line : {"no JSON", "{\"text\": 3}", "{}", "[1]", "{\"text\": \"\xff\"}"}) {
      lines += std::string(line) + "\n";
      ++bad;
    }
  }
  write_file(path("in.jsonl"), lines);
  const Thrown first = refusal(path("in.jsonl"));
  EXPECT_TRUE(first.code == ExitCode::kData && first.says("in.jsonl:2")) << first.message;

  PrepareOptions options;
  options.skip_bad_records = true;
  options.inputs = {path("in.jsonl")};
  options.output = path("store.h5");
  PrepareProgress last;
  for (const int threads : {1, 3}) {
    options.threads = threads;
    prepare_documents(options, &tokenizer(), [&](const PrepareProgress& progress) {
      last = progress;
      return true;
    });
    EXPECT_EQ(last.bad_records, bad);
    ASSERT_EQ(last.first_bad.size(), kBadRecordsNamed);
    for (size_t i = 0; i < last.first_bad.size(); ++i) {
      const size_t line = 2 + i + i / 5;
      EXPECT_NE(last.first_bad[i].find(fmt::format("in.jsonl:{}: ", line)), std::string::npos)
          << last.first_bad[i];
    }
    const std::string skipped = read_file(options.output);
    fs::create_directories(path("good"));
    write_file(path("good/in.jsonl"), json_lines(good));
    EXPECT_TRUE(skipped == store_of(path("good/in.jsonl")));
  }
  write_file(path("in.jsonl"), "no JSON\n");
  const Thrown none = refusal(path("in.jsonl"), options);
  EXPECT_TRUE(none.code == ExitCode::kData && none.says("in.jsonl:1")) << none.message;
  // Text that is no UTF-8 is a bad file, of which parts may have been written.
  write_file(path("in.txt"), "\xff\xff");
  EXPECT_EQ(refusal(path("in.txt"), options).code, ExitCode::kData);
}

TEST_F(InputTest, ALineBeyondTheLimitIsABadRecord) {
  std::string lines = json_lines({"first"});
  lines += "{\"text\": \"" + std::string(kMaxRecordBytes + (3 << 20), 'x') + "\"}\n";
  lines += json_lines({"last"});
  write_file(path("in.jsonl"), lines);
  EXPECT_TRUE(refusal(path("in.jsonl")).says("in.jsonl:2: a line of more than"));
  PrepareOptions options;
  options.skip_bad_records = true;
  const std::string skipped = store_of(path("in.jsonl"), options);
  write_file(path("in.jsonl"), json_lines({"first", "last"}));
  EXPECT_TRUE(skipped == store_of(path("in.jsonl")));
}

// ---- Parquet

// A Parquet file as far as the program looks at it itself.
std::string parquet_shell() {
  return "PAR1 data \x01\0\0\0PAR1"s;
}

// A program in place of Python, which gives out what a test wants to hear.
class FakePython : public InputTest {
 protected:
  static void run_instead(const std::string& script) {
    write_file(path("python"), "#!/bin/bash\n# -c PROGRAM MODE ...\nmode=$3\n" + script);
    fs::permissions(path("python"), fs::perms::owner_all);
    ::setenv("SBTRAIN_PYTHON", path("python").c_str(), 1);
  }
  void TearDown() override { ::unsetenv("SBTRAIN_PYTHON"); }
};

TEST_F(FakePython, RowsAreDocuments) {
  write_file(path("t.parquet"), parquet_shell());
  run_instead(
      "if [ $mode = check ]; then echo 3; else\n"
      "printf '\\3\\0\\0\\0\\377\\377\\377\\377one\\0\\0\\0\\0\\1\\0\\0\\0s'\n"
      "printf '\\3\\0\\0\\0\\1\\0\\0\\0twos'; fi\n");
  write_file(path("t.jsonl"), "{\"text\":\"one\"}\n{\"text\":\"two\",\"source\":\"s\"}\n");
  EXPECT_TRUE(store_of(path("t.parquet")) == store_of(path("t.jsonl")));
}

TEST_F(FakePython, WhatGoesWrongIsSaid) {
  write_file(path("t.parquet"), parquet_shell());
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"echo No module named pyarrow >&2; exit 3", "needs pyarrow"},
      // What is advised works where the system's Python is "externally managed", too.
      {"exit 3", "python3 -m venv"},
      {"exit 0", "does not answer as Python does"},
      {"echo t.parquet: no column >&2; exit 4", "no column"},
      {"kill -9 $$", "exit code 137"},
      {"if [ $mode = check ]; then echo 2; else printf '\\1\\0\\0\\0\\0\\0\\0\\0x'; fi",
       "1 of its 2"},
      {"if [ $mode = check ]; then echo 2; else printf '\\377\\0\\0\\0\\0\\0\\0\\0x'; fi", "row 1"},
      {"if [ $mode = check ]; then echo 2; else printf '\\1\\0\\0\\200\\0\\0\\0\\0x'; fi", "row 1"},
      {"if [ $mode = check ]; then echo 2; else echo t.parquet: bad page >&2; exit 4; fi",
       "bad page"}};
  for (const auto& [script, says] : cases) {
    run_instead(script + "\n");
    const Thrown error = refusal(path("t.parquet"));
    EXPECT_EQ(error.code, ExitCode::kData) << script;
    EXPECT_TRUE(error.says(says) && error.says("t.parquet")) << script << error.message;
  }
  ::setenv("SBTRAIN_PYTHON", path("none").c_str(), 1);
  EXPECT_TRUE(refusal(path("t.parquet")).says("SBTRAIN_PYTHON"));
}

TEST_F(FakePython, IsNotAskedForAFileThatIsCutShort) {
  run_instead("exit 1\n");
  for (const std::string& content : {"PAR1"s, "PAR1 data"s, "PAR1\xff\0\0\0PAR1"s}) {
    EXPECT_TRUE(refusal_of("cut.parquet", content).says("cut short")) << content;
  }
}

class ParquetTest : public InputTest {
 protected:
  void SetUp() override {
    if (python("import pyarrow").status != 0) {
      GTEST_SKIP() << python_interpreter() << " has no pyarrow (scripts/setup.sh python)";
    }
  }
  static PythonHelper::Result python(const std::string& program) {
    PythonHelper helper("import os, sys\nos.chdir(sys.argv[1])\n" + program, {path("")}, "",
                        "python");
    return helper.wait();
  }
};

TEST_F(ParquetTest, TablesGiveTheStoreOfTheSameJsonLines) {
  std::string lines;
  for (int i = 0; i < 100; ++i) {
    const std::string text = texts()[static_cast<size_t>(i) % texts().size()];
    lines +=
        nlohmann::json{{"text", std::to_string(i) + text}, {"source", "s" + std::to_string(i % 3)}}
            .dump() +
        "\n";
  }
  write_file(path("t.jsonl"), lines);
  const std::string expected = store_of(path("t.jsonl"));
  const std::string program = R"(
import json, pyarrow as pa, pyarrow.parquet as pq
rows = [json.loads(line) for line in open("t.jsonl", encoding="utf-8")]
texts, sources = [r["text"] for r in rows], [r["source"] for r in rows]
def write(name, text, source, **options):
    pq.write_table(pa.table({"id": list(range(len(rows))), "text": text, "source": source}), name, **options)
write("plain.parquet", texts, sources, compression="none", row_group_size=7)
write("zstd.parquet", texts, sources, compression="zstd", row_group_size=1000)
write("large.parquet", pa.array(texts, pa.large_string()), pa.array(sources).dictionary_encode())
meta = pa.StructArray.from_arrays([pa.array(texts), pa.array(sources)], ["body", "set"])
pq.write_table(pa.table({"meta": meta, "text": list(range(len(rows)))}), "nested.parquet")
write("nulls.parquet", [None, "a", None] + [""] * (len(rows) - 4) + ["b"], [None] * len(rows))
pq.write_table(pa.table({"text": [1, 2]}), "numbers.parquet")
pq.write_table(pa.table({"body": ["a"]}), "other.parquet")
bad = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(bytes([0, 0, 0, 0, 2, 0, 0, 0])), pa.py_buffer(b"\xff\xfe")])
pq.write_table(pa.table({"text": bad}), "bytes.parquet")
data = bytearray(open("zstd.parquet", "rb").read())
for i in range(200, 3000): data[i] ^= 255
open("damaged.parquet", "wb").write(data)
)";
  const PythonHelper::Result written = python(program);
  ASSERT_EQ(written.status, 0) << written.errors;
  for (const char* name : {"plain.parquet", "zstd.parquet", "large.parquet"}) {
    EXPECT_TRUE(store_of(path(name)) == expected) << name;
  }
  PrepareOptions nested;
  nested.input.keys = {.text = "meta.body", .source = "meta.set"};
  EXPECT_TRUE(store_of(path("nested.parquet"), nested) == expected);
  store_of(path("nulls.parquet"));
  EXPECT_EQ(DocumentStore(path("store.h5")).documents(), 2);
  EXPECT_TRUE(refusal(path("numbers.parquet")).says("'text' holds int64"));
  const Thrown other = refusal(path("other.parquet"));
  EXPECT_TRUE(other.says("no column 'text'") && other.says("body")) << other.message;
  for (const char* name : {"bytes.parquet", "damaged.parquet"}) {
    const Thrown error = refusal(path(name));
    EXPECT_EQ(error.code, ExitCode::kData) << error.message;
    EXPECT_TRUE(error.says(name) && error.says("cannot be read")) << error.message;
  }
}

TEST_F(ParquetTest, BombsAreRefusedInLittleMemory) {
  const PythonHelper::Result written = python(R"(
import pyarrow as pa, pyarrow.parquet as pq
def repeat(name, text, rows):
    column = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([text]))
    pq.write_table(pa.table({"text": column}), name, compression="zstd")
repeat("long.parquet", "a" * (32 << 20), 10000)
repeat("many.parquet", "a" * 1000, 100000)
pq.write_table(pa.table({"text": pa.nulls(3000000, pa.string())}), "nulls.parquet")
pq.write_table(pa.table({"text": ["a" * (16 << 20)] * 4}), "page.parquet", compression="zstd", use_dictionary=False)
repeat("few.parquet", "a" * 1000, 1000)
)");
  ASSERT_EQ(written.status, 0) << written.errors;
  for (const char* name : {"long.parquet", "many.parquet", "nulls.parquet", "page.parquet"}) {
    EXPECT_LT(fs::file_size(path(name)), size_t{100} << 10);
    const Thrown error = refusal(path(name));
    EXPECT_EQ(error.code, ExitCode::kData) << error.message;
    EXPECT_TRUE(error.says(name) && error.says("250 times")) << error.message;
  }
  rusage children{};
  ::getrusage(RUSAGE_CHILDREN, &children);
  EXPECT_LT(children.ru_maxrss, 800 << 10) << "KiB of the largest child";
  // A megabyte is text that somebody may have, whatever it compresses to.
  EXPECT_FALSE(store_of(path("few.parquet")).empty());
}

}  // namespace
}  // namespace sbtrain::test
