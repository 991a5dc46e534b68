// Every format of text that `sbtrain prepare` reads but Parquet, whole and damaged.
#include "unit/text/input.h"

#include "core/utf8.h"
#include "text/text_reader.h"
#include "unit/text/compress.h"

namespace sbtrain::test {
namespace {

namespace fs = std::filesystem;
using namespace std::string_literals;

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

}  // namespace
}  // namespace sbtrain::test
