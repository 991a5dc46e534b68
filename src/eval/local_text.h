// A text of the user, in which needles are hidden.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace sbtrain {

// The words of a text, separated by white space, and its sentences. A sentence ends with a word
// that ends in '.', '!' or '?', closing quotes and brackets not counted.
class LocalText {
 public:
  explicit LocalText(std::string text);

  int64_t words() const { return static_cast<int64_t>(words_.size()); }
  // Sentences begun by the first `words` words.
  int64_t sentences(int64_t words) const;
  // The first `words` words, joined by spaces, from sentence `first` up to sentence `last`.
  std::string between(int64_t words, int64_t first, int64_t last) const;

 private:
  int64_t word_of(int64_t words, int64_t sentence) const;
  std::string text_;
  std::vector<std::string_view> words_;
  std::vector<int64_t> starts_;  // the first word of each sentence
};

}  // namespace sbtrain
