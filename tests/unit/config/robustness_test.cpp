// Any content of a file gives a Config or an Error, never a crash or a hang.
#include <gtest/gtest.h>

#include <random>

#include "config/schema.h"
#include "core/error.h"

namespace sbtrain {
namespace {

// Returns the error's message, or nothing if `text` is accepted; then it must survive a round trip.
std::string outcome(std::string_view text) {
  try {
    const Config config = parse_config(text, "f");
    EXPECT_EQ(parse_config(config_yaml(config), "printed"), config) << text;
    return "";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kConfig) << text;
    return error.what();
  }
}

std::string repeat(std::string_view text, int times) {
  std::string result;
  for (int i = 0; i < times; ++i) result += text;
  return result;
}

TEST(Robustness, Bytes) {
  using namespace std::string_view_literals;
  EXPECT_EQ(outcome("name: a\0b"sv), "f:1:8: byte 0x00 is not UTF-8 text");
  EXPECT_EQ(outcome("name: a\nout: \xff\xfe"), "f:2:6: byte 0xff is not UTF-8 text");
  EXPECT_EQ(outcome("\xff\xfen\0a\0"sv), "f:1:1: byte 0xff is not UTF-8 text");
  EXPECT_EQ(outcome("name: \"\\x00\""), "f:1:7: name: expected text, got '\\x00'");
  EXPECT_EQ(outcome(repeat("# comment\n", 200000)),
            "f: larger than 1 MiB, so it is no configuration");
  EXPECT_NE(outcome("\xef\xbb\xbfname: a"), "");  // a byte order mark alone does no harm
}

TEST(Robustness, Nesting) {
  EXPECT_EQ(outcome("data: " + repeat("[", 70) + repeat("]", 70)),
            "f:1:70: nested more than 64 levels deep");
  EXPECT_NE(outcome(repeat("[", 100000)), "");
  EXPECT_NE(outcome(repeat("{a: ", 100000)), "");
  EXPECT_NE(outcome(repeat("- ", 100000)), "");
  EXPECT_NE(outcome(repeat("? ", 10000)), "");
  EXPECT_NE(outcome(repeat("&a ", 1000)), "");
}

TEST(Robustness, Aliases) {
  EXPECT_EQ(outcome("data: {sources: [&s {path: a.h5}]}\n"
                    "stages: [{length: 5, sources: [*s]}]\n"),
            "");
  std::string bomb = "a0: &a0 [x]\n";
  for (int i = 1; i < 30; ++i) {
    bomb += "a" + std::to_string(i) + ": &a" + std::to_string(i) + " [";
    for (int k = 0; k < 10; ++k) bomb += "*a" + std::to_string(i - 1) + (k < 9 ? "," : "]\n");
  }
  EXPECT_NE(outcome(bomb).find("too many values for a configuration"), std::string::npos);
}

TEST(Robustness, Oddities) {
  for (const char* text : {"",
                           "\n",
                           "---\n",
                           "...",
                           "%YAML 1.2\n---\nname: a",
                           "%FOO",
                           "?",
                           ":",
                           "-",
                           "!",
                           "&",
                           "*",
                           "|",
                           ">",
                           "'",
                           "\"",
                           "@",
                           "`",
                           "{",
                           "}",
                           "[",
                           "]",
                           ",",
                           "? a : b",
                           "name: [",
                           "name: {a",
                           "<<: 1",
                           "name: &a",
                           "name: *a",
                           "name: !",
                           "name: !!",
                           "name: !<>",
                           "name: |\n",
                           "name: >9\n x",
                           "\"\\",
                           "\"\\u",
                           "\"\\ud800\"",
                           "\"\\U00110000\": 1",
                           "'': 1",
                           "~: 1",
                           "[]: 1",
                           "{}: 1",
                           "1: 2",
                           "include: x",
                           "include: include",
                           "include:",
                           "name: a\n name: b",
                           "- - - -",
                           "a\tb: c",
                           "stages: [null]",
                           "stages: [[]]",
                           "stages: [{}]",
                           "model: {attention: [null]}",
                           "data: {validation: [[]]}",
                           "data: {validation: [~]}",
                           "data: {validation: {}}"}) {
    EXPECT_NE(outcome(text), "") << text;
  }
}

// Byte flips, insertions, deletions and repeated pieces of a file that uses most of the syntax.
TEST(Robustness, Mutations) {
  using namespace std::string_literals;
  const std::string original = R"(# comment
name: "run \u00e9"
seed: 1e3
model:
  layers: 4
  attention: &att
    - {type: softmax, position: rope, rope_base: 1.5e4}
    - type: stickbreaking
      remainder: 'bias'
train: {lr: 1e-3, batch: 8, micro_batch: 4}
data:
  sources: [{path: a.h5, weight: 0.5}, &s {path: b.h5}]
  validation:
    - v.h5
stages:
  - name: one
    length: 5M tokens
    schedule: {type: wsd, warmup: 10 steps}
  - name: >-
      two
    length: 20 steps
    sources: [*s]
)";
  ASSERT_EQ(outcome(original), "");
  const std::string alphabet = "{}[]:,-?&*!|>'\"#%@` \n\tae019.~<\x00\xff"s;
  std::mt19937 random(1);
  const auto below = [&](size_t n) {
    return std::uniform_int_distribution<size_t>(0, n - 1)(random);
  };
  for (int round = 0; round < 3000; ++round) {
    std::string text = original;
    for (size_t edits = 1 + below(4); edits > 0 && !text.empty(); --edits) {
      const size_t at = below(text.size());
      switch (below(4)) {
        case 0:
          text[at] = alphabet[below(alphabet.size())];
          break;
        case 1:
          text.insert(at, 1, alphabet[below(alphabet.size())]);
          break;
        case 2:
          text.erase(at, 1 + below(8));
          break;
        default:
          text.insert(below(text.size()), text.substr(at, 1 + below(40)));
      }
    }
    outcome(text);
  }
}

}  // namespace
}  // namespace sbtrain
