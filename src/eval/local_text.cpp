#include "eval/local_text.h"

#include <algorithm>

#include "core/error.h"

namespace sbtrain {
namespace {

constexpr std::string_view kSpace = " \t\n\r\f\v";

bool ends_sentence(std::string_view word) {
  const size_t last = word.find_last_not_of("\"')]");
  return last != std::string_view::npos &&
         std::string_view(".!?").find(word[last]) != std::string_view::npos;
}

}  // namespace

LocalText::LocalText(std::string text) : text_(std::move(text)) {
  const std::string_view all = text_;
  bool begins = true;
  for (size_t begin = all.find_first_not_of(kSpace); begin != std::string_view::npos;) {
    const size_t end = std::min(all.find_first_of(kSpace, begin), all.size());
    if (begins) starts_.push_back(words());
    words_.push_back(all.substr(begin, end - begin));
    begins = ends_sentence(words_.back());
    begin = all.find_first_not_of(kSpace, end);
  }
}

int64_t LocalText::sentences(int64_t words) const {
  return std::lower_bound(starts_.begin(), starts_.end(), words) - starts_.begin();
}

int64_t LocalText::word_of(int64_t words, int64_t sentence) const {
  return sentence < sentences(words) ? starts_[static_cast<size_t>(sentence)] : words;
}

std::string LocalText::between(int64_t words, int64_t first, int64_t last) const {
  require(words <= this->words(), "{} words of a text of {}", words, this->words());
  std::string text;
  const int64_t end = word_of(words, last);
  for (int64_t i = word_of(words, first); i < end; ++i) {
    if (!text.empty()) text += ' ';
    text += words_[static_cast<size_t>(i)];
  }
  return text;
}

}  // namespace sbtrain
