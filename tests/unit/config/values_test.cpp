#include "config/values.h"

#include <gtest/gtest.h>

#include <limits>

namespace sbtrain::schema {
namespace {

TEST(Values, IntegersMayBeWrittenInAnyWholeForm) {
  const std::vector<std::pair<const char*, int64_t>> good = {
      {"0", 0},
      {"42", 42},
      {"-7", -7},
      {"+7", 7},
      {"1e12", 1000000000000},
      {"2.5e3", 2500},
      {"1.50K", 1500},
      {"5M", 5000000},
      {"1.5e1K", 15000},
      {"3G", 3000000000},
      {"1T", 1000000000000},
      {"1200e-2", 12},
      {"0e99999999999", 0},
      {" 8 ", 8},
      {"9223372036854775807", std::numeric_limits<int64_t>::max()}};
  for (const auto& [text, expected] : good) {
    int64_t value = -1;
    EXPECT_TRUE(from_text(text, value)) << text;
    EXPECT_EQ(value, expected) << text;
  }
}

TEST(Values, WhatIsNoWholeNumberIsRefused) {
  for (const char* text : {"",     " ",
                           "-",    "+",
                           ".",    "e3",
                           "1e",   "1e+",
                           "0x10", "1_000",
                           "2.5",  "1.0005K",
                           "1e-1", "5m",
                           "5KB",  "K",
                           "1..2", "--1",
                           "+-1",  "9223372036854775808",
                           "1e19", "1e99999999999",
                           "nan",  "inf",
                           "12 34"}) {
    int64_t value = 5;
    EXPECT_FALSE(from_text(text, value)) << text;
    EXPECT_EQ(value, 5) << text;
  }
  uint64_t seed = 0;
  EXPECT_FALSE(from_text("-1", seed));
  EXPECT_FALSE(from_text("18446744073709551616", seed));
  EXPECT_TRUE(from_text("18446744073709551615", seed));
  EXPECT_EQ(seed, std::numeric_limits<uint64_t>::max());
}

TEST(Values, NumbersAreFinite) {
  double value = 0;
  EXPECT_TRUE(from_text("1e-3", value));
  EXPECT_EQ(value, 1e-3);
  EXPECT_TRUE(from_text("+.5", value));
  EXPECT_EQ(value, 0.5);
  EXPECT_TRUE(from_text("-2", value));
  EXPECT_EQ(value, -2);
  for (const char* text :
       {"", "nan", "inf", "-inf", ".nan", "1e999", "1,5", "1 2", "0x1p3", "+-1"}) {
    EXPECT_FALSE(from_text(text, value)) << text;
  }
}

TEST(Values, Durations) {
  const auto steps = Duration::Unit::kSteps;
  const auto tokens = Duration::Unit::kTokens;
  const auto epochs = Duration::Unit::kEpochs;
  const std::vector<std::pair<const char*, Duration>> good = {{"300", {300, steps}},
                                                              {"300 steps", {300, steps}},
                                                              {"1 step", {1, steps}},
                                                              {"2e9 tokens", {2000000000, tokens}},
                                                              {"5M tokens", {5000000, tokens}},
                                                              {"1.5K steps", {1500, steps}},
                                                              {"7tokens", {7, tokens}},
                                                              {"64 epochs", {64, epochs}},
                                                              {"1 epoch", {1, epochs}},
                                                              {"  12   tokens ", {12, tokens}}};
  for (const auto& [text, expected] : good) {
    Duration value;
    EXPECT_TRUE(from_text(text, value)) << text;
    EXPECT_EQ(value, expected) << text;
  }
  for (const char* text :
       {"", "steps", "tokens", "3 eons", "1.5 steps", "2e9 token s", "3 steps 4"}) {
    Duration value;
    EXPECT_FALSE(from_text(text, value)) << text;
  }
}

TEST(Values, TextsReadBackExactly) {
  for (double value : {0.0, 1e-8, 0.1, 5.9604644775390625e-08, 1.0 / 3.0, 1e300, 5e-324, -2.5}) {
    double back = -1;
    EXPECT_TRUE(from_text(to_text(value), back)) << to_text(value);
    EXPECT_EQ(back, value);
  }
  for (int64_t count : {0, 1, 300, 1000, 1000000, 25000000, 123456789}) {
    for (auto unit : {Duration::Unit::kSteps, Duration::Unit::kTokens, Duration::Unit::kEpochs}) {
      Duration back;
      EXPECT_TRUE(from_text(to_text(Duration{count, unit}), back));
      EXPECT_EQ(back, (Duration{count, unit}));
    }
  }
  EXPECT_EQ(to_text(Duration{250000000000, Duration::Unit::kTokens}), "250e9 tokens");
}

TEST(Values, TextIsUtf8WithoutControlCharacters) {
  std::string value;
  EXPECT_TRUE(from_text("gr\xc3\xbc\xc3\x9f", value));
  for (const char* text :
       {"a\nb", "\x7f", "\xff", "\xc3", "\xed\xa0\x80", "\xc0\xaf", "\xf5\x80\x80\x80"}) {
    EXPECT_FALSE(from_text(text, value));
  }
  EXPECT_FALSE(from_text(std::string_view("a\0b", 3), value));
}

TEST(Values, NearestMatch) {
  const std::vector<std::string> words = {"layers", "width", "heads"};
  EXPECT_EQ(nearest("layer", words), "layers");
  EXPECT_EQ(nearest("wdith", words), "width");
  EXPECT_EQ(nearest("haeds", words), "heads");
  EXPECT_EQ(nearest("something", words), "");
  EXPECT_EQ(nearest("", words), "");
  EXPECT_EQ(nearest(std::string(100000, 'x'), words), "");
}

TEST(Values, QuotedIsOneShortLine) {
  EXPECT_EQ(in_quotes("plain"), "'plain'");
  EXPECT_EQ(in_quotes("a\nb\xff"), "'a\\x0ab\\xff'");
  EXPECT_LT(in_quotes(std::string(100000, 'x')).size(), 100U);
}

}  // namespace
}  // namespace sbtrain::schema
