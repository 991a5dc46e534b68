// The text of a completion while it grows: tokens may end inside a character, and stop strings may
// begin in one token and end in another.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "data/tokenizer.h"

namespace sbtrain {

// `text` with each byte that is no valid UTF-8 replaced by U+FFFD, as JSON needs it.
std::string valid_utf8(std::string_view text);

class CompletionText {
 public:
  // The text ends before the first occurrence of any of `stops`, which are not empty.
  CompletionText(const Tokenizer& tokenizer, std::vector<std::string> stops);

  // Returns false once the text has ended at a stop string; nothing is to be added then.
  bool add(int32_t token);
  // Takes what later tokens cannot change: whole characters that no stop string begins with.
  std::string take();
  // Takes all that is left, at the end.
  std::string take_rest();

 private:
  size_t beginning_of_a_stop() const;
  const Tokenizer& tokenizer_;
  std::vector<std::string> stops_;
  size_t longest_ = 0;  // of the stop strings, in bytes
  std::string pending_;
  bool stopped_ = false;
};

}  // namespace sbtrain
