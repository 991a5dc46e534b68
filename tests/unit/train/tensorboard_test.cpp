#include "train/tensorboard.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>

#include "support/process.h"

namespace sbtrain::test {
namespace {

// A reader that follows the format and is independent of the writer.
template <typename T>
T take(std::string_view& bytes) {
  T value;
  EXPECT_GE(bytes.size(), sizeof(T));
  std::memcpy(&value, bytes.data(), sizeof(T));
  bytes.remove_prefix(sizeof(T));
  return value;
}

uint64_t take_varint(std::string_view& bytes) {
  uint64_t value = 0;
  for (int shift = 0;; shift += 7) {
    const auto byte = take<uint8_t>(bytes);
    value |= static_cast<uint64_t>(byte & 0x7F) << shift;
    if (byte < 0x80) return value;
  }
}

struct Fields {
  std::multimap<uint64_t, uint64_t> numbers;
  std::multimap<uint64_t, std::string_view> bytes;
};

Fields parse_message(std::string_view message) {
  Fields fields;
  while (!message.empty()) {
    const uint64_t key = take_varint(message);
    switch (key & 7) {
      case 0:
        fields.numbers.emplace(key >> 3, take_varint(message));
        break;
      case 1:
        fields.numbers.emplace(key >> 3, take<uint64_t>(message));
        break;
      case 2: {
        const uint64_t size = take_varint(message);
        fields.bytes.emplace(key >> 3, message.substr(0, size));
        message.remove_prefix(size);
        break;
      }
      case 5:
        fields.numbers.emplace(key >> 3, take<uint32_t>(message));
        break;
      default:
        ADD_FAILURE() << "wire type " << (key & 7);
        return fields;
    }
  }
  return fields;
}

uint32_t mask(uint32_t crc) {
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8U;
}

std::vector<std::string> read_events(const std::string& path) {
  const std::string file = read_file(path);
  std::string_view bytes = file;
  std::vector<std::string> events;
  while (!bytes.empty()) {
    const std::string_view header = bytes.substr(0, 8);
    const auto size = take<uint64_t>(bytes);
    EXPECT_EQ(take<uint32_t>(bytes), mask(crc32c(header)));
    const std::string_view payload = bytes.substr(0, size);
    bytes.remove_prefix(size);
    EXPECT_EQ(take<uint32_t>(bytes), mask(crc32c(payload)));
    events.emplace_back(payload);
  }
  return events;
}

double as_double(uint64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

float as_float(uint64_t bits) {
  const auto low = static_cast<uint32_t>(bits);
  float value;
  std::memcpy(&value, &low, sizeof(value));
  return value;
}

// The test vectors of RFC 3720, appendix B.4, and the usual check value.
TEST(Tensorboard, Crc32cMeetsThePublishedVectors) {
  EXPECT_EQ(crc32c(""), 0U);
  EXPECT_EQ(crc32c("123456789"), 0xE3069283U);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AAU);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62A8AB43U);
}

TEST(Tensorboard, EventsReadBack) {
  const TemporaryFolder folder;
  TensorboardWriter writer(folder / "tb", {});
  writer.write({300, 1700000000.25, {{"train/loss", 4.25}, {"train/lr", 1e-3}}});
  writer.write({1LL << 40, 1700000001.0, {{"train/loss", std::nan("")}}});
  const auto events = read_events(writer.path());
  ASSERT_EQ(events.size(), 4U);

  const Fields version = parse_message(events[0]);
  EXPECT_EQ(version.bytes.find(3)->second, "brain.Event:2");
  EXPECT_GT(as_double(version.numbers.find(1)->second), 1.6e9);

  const Fields event = parse_message(events[2]);
  EXPECT_EQ(as_double(event.numbers.find(1)->second), 1700000000.25);
  EXPECT_EQ(event.numbers.find(2)->second, 300U);
  const Fields summary = parse_message(event.bytes.find(5)->second);
  std::map<std::string, float> scalars;
  for (const auto& [field, value] : summary.bytes) {
    EXPECT_EQ(field, 1U);
    const Fields scalar = parse_message(value);
    scalars[std::string(scalar.bytes.find(1)->second)] = as_float(scalar.numbers.find(2)->second);
  }
  EXPECT_EQ(scalars, (std::map<std::string, float>{{"train/loss", 4.25F}, {"train/lr", 1e-3F}}));

  const Fields large = parse_message(events[3]);
  EXPECT_EQ(large.numbers.find(2)->second, 1ULL << 40);
}

TEST(Tensorboard, AResumedRunMarksWhereItGoesOn) {
  const TemporaryFolder folder;
  const TensorboardWriter first(folder.path(), {});
  const TensorboardWriter second(folder.path(), 41);
  EXPECT_NE(first.path(), second.path());
  EXPECT_LT(first.path(), second.path());  // the order in which TensorBoard reads them
  const auto events = read_events(second.path());
  ASSERT_EQ(events.size(), 2U);
  const Fields start = parse_message(events[1]);
  EXPECT_EQ(start.numbers.find(2)->second, 42U);
  EXPECT_EQ(parse_message(start.bytes.find(7)->second).numbers.find(1)->second, 1U);
}

// Otherwise TensorBoard shows the records of the run before and those of this one as one series.
TEST(Tensorboard, ARunThatBeginsAnewDropsAllThatWasBefore) {
  const TemporaryFolder folder;
  TensorboardWriter writer(folder.path(), {});
  const auto events = read_events(writer.path());
  ASSERT_EQ(events.size(), 2U);
  const Fields start = parse_message(events[1]);
  EXPECT_FALSE(start.numbers.contains(2));  // step 0
  EXPECT_EQ(parse_message(start.bytes.find(7)->second).numbers.find(1)->second, 1U);
}

TEST(Tensorboard, TextsAreForThePluginOfTexts) {
  const TemporaryFolder folder;
  TensorboardWriter writer(folder.path(), 6);
  writer.write_text("config", "    train: {}\n", 6);
  const auto events = read_events(writer.path());
  ASSERT_EQ(events.size(), 3U);
  const Fields event = parse_message(events[2]);
  EXPECT_EQ(event.numbers.find(2)->second, 6U);
  const Fields summary = parse_message(event.bytes.find(5)->second);
  const Fields value = parse_message(summary.bytes.find(1)->second);
  EXPECT_EQ(value.bytes.find(1)->second, "config");
  const Fields tensor = parse_message(value.bytes.find(8)->second);
  EXPECT_EQ(tensor.numbers.find(1)->second, 7U);  // DT_STRING
  EXPECT_EQ(tensor.bytes.find(8)->second, "    train: {}\n");
  const Fields metadata = parse_message(value.bytes.find(9)->second);
  EXPECT_EQ(parse_message(metadata.bytes.find(1)->second).bytes.find(1)->second, "text");
}

}  // namespace
}  // namespace sbtrain::test
