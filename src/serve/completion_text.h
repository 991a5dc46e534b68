// The text of a completion while it grows: tokens may end inside a character, and stop strings may
// begin in one token and end in another.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/tokenizer.h"

namespace sbtrain {

// `text` with each byte that is no valid UTF-8 replaced by U+FFFD, as JSON needs it.
std::string valid_utf8(std::string_view text);

// Counts the characters of a text that is given token by token, as valid_utf8 shows them.
class CharacterOffsets {
 public:
  explicit CharacterOffsets(int64_t start = 0) : before_(start) {}
  // Adds a token, and returns the offset of its first byte: the characters that begin before it.
  int64_t add(std::string_view bytes);

 private:
  int64_t before_;    // the characters before open_
  std::string open_;  // the beginning of a character whose end may follow
};

class CompletionText {
 public:
  // The text ends before the first occurrence of any of `stops`, which are not empty.
  CompletionText(const Tokenizer& tokenizer, std::vector<std::string> stops);

  // The text begins with these bytes, of a character whose end may follow.
  void begin(std::string_view bytes) { pending_ = bytes; }
  // Returns false once the text has ended at a stop string; nothing is to be added then. The text
  // goes on through stop strings that are complete with a token for which `may_stop` is false.
  bool add(int32_t token, bool may_stop = true);
  // Takes what later tokens cannot change: whole characters that no stop string begins with.
  std::string take();
  // Takes all that is left, at the end.
  std::string take_rest();

 private:
  size_t beginning_of_a_stop() const;
  const Tokenizer& tokenizer_;
  std::vector<std::string> stops_;
  std::string pending_;
  bool stopped_ = false;
};

}  // namespace sbtrain
