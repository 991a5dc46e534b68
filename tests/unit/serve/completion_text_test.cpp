#include "serve/completion_text.h"

#include <gtest/gtest.h>

#include <random>

#include "core/utf8.h"

namespace sbtrain {
namespace {

// A byte-level tokenizer: each byte of a text can be a token of its own.
const Tokenizer& tokenizer() {
  static const Tokenizer tokenizer(SBTRAIN_TEST_DATA "/tokenizer/llama3/tokenizer.json");
  return tokenizer;
}

// The tokens of single bytes.
std::vector<int32_t> bytes_of(const std::string& text) {
  std::vector<int32_t> tokens;
  for (const char byte : text) {
    int32_t found = -1;
    for (int32_t id = 0; id < tokenizer().size() && found < 0; ++id) {
      if (tokenizer().bytes(id) == std::string_view(&byte, 1)) found = id;
    }
    EXPECT_GE(found, 0);
    tokens.push_back(found);
  }
  return tokens;
}

struct Shown {
  std::vector<std::string> parts;
  std::string text;
  bool stopped = false;
};
Shown show(const std::string& bytes, const std::vector<std::string>& stops) {
  CompletionText text(tokenizer(), stops);
  Shown shown;
  for (const int32_t token : bytes_of(bytes)) {
    const bool goes_on = text.add(token);
    shown.parts.push_back(text.take());
    shown.text += shown.parts.back();
    if (goes_on) continue;
    shown.stopped = true;
    break;
  }
  shown.parts.push_back(text.take_rest());
  shown.text += shown.parts.back();
  return shown;
}

TEST(CompletionText, CharactersAreShownWhole) {
  const Shown shown = show("a\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80.", {});
  EXPECT_EQ(shown.text, "a\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80.");
  for (const std::string& part : shown.parts) EXPECT_EQ(valid_length(part), part.size());
}

TEST(CompletionText, InvalidBytesAreReplaced) {
  EXPECT_EQ(show("a\xff\xe2\x82", {}).text, "a\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd");
  EXPECT_EQ(valid_utf8("\xc3(\xa0"), "\xef\xbf\xbd(\xef\xbf\xbd");
}

// A text that must go on passes stop strings, and does not end at them later.
TEST(CompletionText, GoesOnThroughStopStrings) {
  const auto text_of = [](const std::string& bytes, size_t goes_on) {
    CompletionText text(tokenizer(), {"bc", "xyz"});
    std::string shown;
    const std::vector<int32_t> tokens = bytes_of(bytes);
    for (size_t i = 0; i < tokens.size(); ++i) {
      if (!text.add(tokens[i], i >= goes_on)) break;
      shown += text.take();
    }
    return shown + text.take_rest();
  };
  EXPECT_EQ(text_of("abcdxyz", 0), "a");
  EXPECT_EQ(text_of("abcdxyz", 2), "a");  // complete with the third
  EXPECT_EQ(text_of("abcdxyz", 3), "abcd");
  EXPECT_EQ(text_of("abcde", 3), "abcde");
  EXPECT_EQ(text_of("abcbc", 3), "abc");
  EXPECT_EQ(text_of("xyxyz", 4), "xy");
}

TEST(CompletionText, CharacterThatThePromptBegins) {
  CompletionText text(tokenizer(), {});
  text.begin("\xe2\x82");
  EXPECT_TRUE(text.add(bytes_of("\xac")[0]));
  EXPECT_EQ(text.take(), "\xe2\x82\xac");
  text.begin("\xe2\x82");
  EXPECT_EQ(text.take(), "");
  EXPECT_EQ(text.take_rest(), "\xef\xbf\xbd\xef\xbf\xbd");
}

// An offset is that of the token in the text as it is shown, whatever bytes come before it.
TEST(CharacterOffsets, CountWhatIsShown) {
  const auto offsets = [](const std::vector<std::string>& tokens) {
    CharacterOffsets counter;
    std::vector<int64_t> list;
    for (const std::string& token : tokens) list.push_back(counter.add(token));
    return list;
  };
  using List = std::vector<int64_t>;
  EXPECT_EQ(offsets({"a", "", "\xc3\xa9\xe2\x82\xac", "b"}), (List{0, 1, 1, 3}));
  EXPECT_EQ(offsets({"\xe2", "\x82", "\xac", "b"}), (List{0, 1, 1, 1}));
  EXPECT_EQ(offsets({"\x9d", "b"}), (List{0, 1}));
  EXPECT_EQ(offsets({"\xe2", "\x82", "b", "c"}), (List{0, 1, 2, 3}));
  EXPECT_EQ(offsets({"\xe2\x82", "\xe2", "\x82\xac", "\xff", "b"}), (List{0, 2, 3, 3, 4}));
  EXPECT_EQ(CharacterOffsets(7).add("a"), 7);
}

// The text from each whole token's offset begins with that token, for random pieces.
TEST(CharacterOffsets, FindTheTokensOfRandomBytes) {
  std::mt19937 random(11);
  const std::vector<std::string> pieces = {"a",    "\xc3\xa9", "\xe2", "\x82",
                                           "\xac", "\xf0\x9f", "\xff", ""};
  for (int round = 0; round < 200; ++round) {
    CharacterOffsets counter;
    std::string bytes;
    std::vector<std::pair<std::string, int64_t>> tokens;
    for (int i = 0; i < 12; ++i) {
      const std::string& piece = pieces[random() % pieces.size()];
      tokens.emplace_back(piece, counter.add(piece));
      bytes += piece;
    }
    std::vector<std::string> shown;  // by characters
    for (std::string text = valid_utf8(bytes); !text.empty();) {
      shown.push_back(text.substr(0, character_length(text)));
      text.erase(0, shown.back().size());
    }
    for (const auto& [piece, offset] : tokens) {
      if (piece != "a" && piece != "\xc3\xa9") continue;
      EXPECT_EQ(shown.at(static_cast<size_t>(offset)), piece);
    }
  }
}

TEST(CompletionText, EndsBeforeTheFirstStopString) {
  EXPECT_EQ(show("one two three", {"three", "tw"}).text, "one ");
  EXPECT_TRUE(show("one two three", {"three", "tw"}).stopped);
  EXPECT_EQ(show("aaab", {"aab"}).text, "a");
  EXPECT_EQ(show("abcabd", {"abd", "xyz"}).text, "abc");
  EXPECT_EQ(show("no stop", {"stopped"}).text, "no stop");
  EXPECT_FALSE(show("no stop", {"stopped"}).stopped);
  EXPECT_EQ(show("1\xe2\x82\xac"
                 "2",
                 {"\xe2\x82\xac"})
                .text,
            "1");
}

// What was shown is never taken back, for random texts and stop strings of few letters.
TEST(CompletionText, NeverShowsWhatAStopStringTakesBack) {
  std::mt19937 random(7);
  const auto word = [&](size_t length) {
    std::string text;
    for (size_t i = 0; i < length; ++i) text += static_cast<char>('a' + random() % 2);
    return text;
  };
  for (int i = 0; i < 500; ++i) {
    const std::string text = word(20);
    const std::vector<std::string> stops = {word(2 + random() % 4), word(3 + random() % 4)};
    // Token by token, the first stop string that is complete ends the text.
    size_t end = text.size();
    for (size_t length = 1; length <= text.size() && end == text.size(); ++length) {
      for (const std::string& stop : stops) {
        end = std::min(end, std::string_view(text).substr(0, length).find(stop));
      }
    }
    const Shown shown = show(text, stops);
    EXPECT_EQ(shown.text, text.substr(0, end)) << text << " " << stops[0] << " " << stops[1];
  }
}

}  // namespace
}  // namespace sbtrain
