#include "checkpoint/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <random>

#include "core/error.h"
#include "fixtures.h"
#include "support/process.h"

namespace sbtrain {
namespace {

using test::Process;
using test::read_file;
using test::rewrite;
using test::TemporaryFolder;

std::string file_text(const std::string& header, size_t data_bytes) {
  uint64_t length = header.size();
  std::string text(sizeof(length), '\0');
  std::memcpy(text.data(), &length, sizeof(length));
  return text + header + std::string(data_bytes, 'x');
}

// A file with every element type, odd sizes, a scalar, an empty tensor and a name to be escaped.
std::vector<SafetensorsEntry> write_sample(const std::filesystem::path& path) {
  std::vector<SafetensorsEntry> tensors = {{"bytes", FileDType::kU8, {3}},
                                           {"half", FileDType::kBF16, {5}},
                                           {"float \"quoted\" \\", FileDType::kF32, {3, 7}},
                                           {"long", FileDType::kI64, {2}},
                                           {"unsigned", FileDType::kU64, {}},
                                           {"empty", FileDType::kF32, {0, 9}}};
  Storage storage;
  SafetensorsWriter writer(storage, path, tensors, {{"format", "pt"}, {"note", "line\nbreak"}});
  uint8_t next = 1;
  for (const SafetensorsEntry& entry : writer.entries()) {
    std::vector<uint8_t> data(entry.bytes());
    for (uint8_t& byte : data) byte = next++;
    const size_t half = data.size() / 2;  // in two pieces, the second one first
    writer.write(entry.name, half, data.data() + half, data.size() - half);
    writer.write(entry.name, 0, data.data(), half);
  }
  const auto result = writer.finish();
  EXPECT_EQ(result.bytes, std::filesystem::file_size(path));
  const size_t header = SafetensorsReader(path).data_offset();
  EXPECT_EQ(result.header_sha256, sha256_hex(read_file(path).substr(0, header)));
  return writer.entries();
}

TEST(Safetensors, RoundTripOfEveryKind) {
  TemporaryFolder folder;
  const auto written = write_sample(folder / "a.safetensors");
  const SafetensorsReader reader(folder / "a.safetensors");
  EXPECT_EQ(reader.data_offset() % 8, 0U);
  EXPECT_EQ(reader.metadata().at("note"), "line\nbreak");
  ASSERT_EQ(reader.entries().size(), written.size());
  uint8_t next = 1;
  for (const SafetensorsEntry& entry : written) {
    const SafetensorsEntry& found = reader.at(entry.name);
    EXPECT_EQ(found.dtype, entry.dtype);
    EXPECT_EQ(found.shape, entry.shape);
    EXPECT_EQ(found.begin, entry.begin);
    EXPECT_EQ((reader.data_offset() + found.begin) % file_dtype_size(found.dtype), 0U);
    std::vector<uint8_t> data(entry.bytes());
    reader.read(found, 0, data.data(), data.size());
    for (const uint8_t byte : data) EXPECT_EQ(byte, next++) << entry.name;
  }
  uint8_t last_byte = 0;
  reader.read(reader.at("bytes"), 2, &last_byte, 1);
  EXPECT_EQ(last_byte, next - 1);
  EXPECT_THROW(reader.at("absent"), Error);
}

TEST(Safetensors, KnownDigest) {
  EXPECT_EQ(sha256_hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(Safetensors, PythonReadsIt) {
  if (!std::filesystem::exists("/usr/bin/python3")) GTEST_SKIP() << "no /usr/bin/python3";
  TemporaryFolder folder;
  write_sample(folder / "a.safetensors");
  Process python({"/usr/bin/python3", SBTRAIN_CHECK_SCRIPT, folder / "a.safetensors"},
                 folder / "log");
  EXPECT_EQ(python.wait(), 0) << python.output();
  EXPECT_NE(python.output().find("half BF16 [5]"), std::string::npos) << python.output();
}

TEST(Safetensors, WriterRefusesMisuse) {
  TemporaryFolder folder;
  Storage storage;
  const std::vector<SafetensorsEntry> two = {{"a", FileDType::kF32, {2}},
                                             {"b", FileDType::kF32, {1}}};
  const float data[4] = {};
  SafetensorsWriter writer(storage, folder / "a", two, {});
  EXPECT_THROW(writer.write("c", 0, data, 4), Error);
  EXPECT_THROW(writer.write("a", 0, data, 12), Error);
  EXPECT_THROW(writer.write("a", 4, data, 8), Error);
  EXPECT_THROW(writer.write("a", 12, data, 0), Error);
  writer.write("a", 0, data, 8);
  EXPECT_THROW(writer.finish(), Error);
  const auto create = [&](std::vector<SafetensorsEntry> entries) {
    SafetensorsWriter(storage, folder / "x", std::move(entries), {});
  };
  EXPECT_THROW(create({two[0], two[0]}), Error);
  EXPECT_THROW(create({{"__metadata__", FileDType::kF32, {1}}}), Error);
  EXPECT_THROW(create({{"a", FileDType::kF32, {INT64_MAX, INT64_MAX}}}), Error);
  EXPECT_THROW(SafetensorsWriter(storage, folder / "a", two, {}), Error) << "file exists";
}

struct BadFile {
  const char* header;
  size_t data_bytes;
  const char* message;  // part of it
};

TEST(Safetensors, BadHeadersAreRefusedByName) {
  const BadFile table[] = {
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})", 8, "not valid JSON"},
      {R"([1,2])", 0, "no object"},
      {R"("text")", 0, "no object"},
      {"", 0, "not valid JSON"},
      {"{\"\xff\":1}", 0, "not valid JSON"},
      {R"({"a":5})", 0, "tensor a"},
      {R"({"a":[]})", 0, "tensor a"},
      {R"({"a":{"dtype":"F32","shape":[2]}})", 8, "tensor a"},
      {R"({"a":{"dtype":"F33","shape":[2],"data_offsets":[0,8]}})", 8, "unknown dtype"},
      {R"({"a":{"dtype":7,"shape":[2],"data_offsets":[0,8]}})", 8, "tensor a"},
      {R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", 8, "tensor a"},
      {R"({"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})", 8, "tensor a"},
      {R"({"a":{"dtype":"F32","shape":{"x":2},"data_offsets":[0,8]}})", 8, "lists"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8,9]}})", 8, "tensor a"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8, "tensor a"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4, "does not fill"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"extra":1}})", 8, "nothing else"},
      {R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}})", 0,
       "does not fill"},
      {R"({"a":{"dtype":"F32","shape":[0,4611686018427387904,4],"data_offsets":[0,0]}})", 0,
       "does not fill"},
      {R"({"a":{"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,8]}})", 8,
       "tensor a"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 4, "ends at byte 8"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 12, "the tensors have 8"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})", 12, "hole"},
      {R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[8],"data_offsets":[4,12]}})",
       12, "inside the tensor"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
       1, "twice"},
      {R"({"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1, "twice"},
      {R"({"a":{"dtype":"U8","shape":[[1]],"data_offsets":[0,1]}})", 1, "nested"},
      {R"({"__metadata__":{"x":1}})", 0, "__metadata__"},
      {R"({"__metadata__":[]})", 0, "__metadata__"},
      {R"({"a":1e999})", 0, "not valid JSON"},
  };
  TemporaryFolder folder;
  const auto path = folder / "bad.safetensors";
  const auto refusal = [&](const std::string& text) -> std::string {
    rewrite(path, text);
    try {
      SafetensorsReader reader(path);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kNoCheckpoint);
      return error.what();
    }
    return "accepted";
  };
  for (const BadFile& bad : table) {
    const std::string message = refusal(file_text(bad.header, bad.data_bytes));
    EXPECT_NE(message.find(bad.message), std::string::npos) << bad.header << "\n" << message;
    EXPECT_NE(message.find("bad.safetensors"), std::string::npos) << message;
  }
  EXPECT_NE(refusal(std::string(1000000, '[')).find("header length"), std::string::npos);
  EXPECT_NE(refusal(file_text(std::string(1000000, '['), 0)).find("nested"), std::string::npos);
  EXPECT_NE(refusal("short").find("too few"), std::string::npos);
  EXPECT_NE(refusal("").find("too few"), std::string::npos);
  EXPECT_NE(refusal(std::string(8, '\xff')).find("header length"), std::string::npos);
  EXPECT_EQ(refusal(file_text("{}  ", 0)), "accepted");
}

TEST(Safetensors, FuzzedFilesNeverCrash) {
  TemporaryFolder folder;
  write_sample(folder / "a.safetensors");
  const std::string good = read_file(folder / "a.safetensors");
  std::mt19937 random(1);
  const auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
  const std::string tokens[] = {
      "{",    "}",       "[",   "]", "\"", ",", ":", "0", "-1", "9e9", "99999999999999999999",
      "null", "\\u0000", "\xff"};
  int accepted = 0;
  for (int round = 0; round < 6000; ++round) {
    std::string text = good;
    for (size_t edits = 1 + below(4); edits > 0; --edits) {
      const size_t at = below(text.size());
      switch (below(5)) {
        case 0:
          text[at] = static_cast<char>(text[at] ^ (1 << below(8)));
          break;
        case 1:
          text.insert(at, tokens[below(std::size(tokens))]);
          break;
        case 2:
          text.erase(at, 1 + below(8));
          break;
        case 3:
          text.resize(std::max<size_t>(at, 1));
          break;
        default:
          text.insert(at, text.substr(below(text.size()), below(60)));
      }
    }
    if (round % 2 == 0 && text.size() > 8) {  // more of them pass the check of the length
      const size_t end = text.rfind('}');
      const uint64_t length = end == std::string::npos || end < 8 ? 0 : end - 7;
      std::memcpy(text.data(), &length, sizeof(length));
    }
    rewrite(folder / "b", text);
    try {
      const SafetensorsReader reader(folder / "b");
      ++accepted;
      for (const SafetensorsEntry& entry : reader.entries()) {
        std::vector<char> data(entry.bytes());
        reader.read(entry, 0, data.data(), data.size());
      }
    } catch (const Error& error) {
      ASSERT_EQ(error.code(), ExitCode::kNoCheckpoint) << error.what();
    }
  }
  EXPECT_GT(accepted, 0);
  EXPECT_LT(accepted, 6000);
}

}  // namespace
}  // namespace sbtrain
