#include "serve/completion_text.h"

#include <algorithm>

#include "core/error.h"
#include "core/utf8.h"

namespace sbtrain {

std::string valid_utf8(std::string_view text) {
  std::string valid;
  while (!text.empty()) {
    const size_t length = valid_length(text);
    valid += text.substr(0, length);
    text.remove_prefix(length);
    if (text.empty()) break;
    valid += "\xef\xbf\xbd";
    text.remove_prefix(1);
  }
  return valid;
}

int64_t CharacterOffsets::add(std::string_view bytes) {
  const size_t first = open_.size();
  open_ += bytes;
  const size_t settled = complete_length(open_);
  int64_t offset = before_;
  size_t at = 0;
  while (at < settled) {
    if (at < first) ++offset;
    ++before_;
    at += std::max<size_t>(1, character_length(std::string_view(open_).substr(at)));
  }
  if (at < first) ++offset;  // the token goes on with a character, or adds nothing to it
  open_.erase(0, settled);
  return offset;
}

CompletionText::CompletionText(const Tokenizer& tokenizer, std::vector<std::string> stops)
    : tokenizer_(tokenizer), stops_(std::move(stops)) {
  for (const std::string& stop : stops_) {
    require(!stop.empty(), "an empty stop string");
  }
}

bool CompletionText::add(int32_t token, bool may_stop) {
  require(!stopped_, "the text has ended");
  const size_t before = pending_.size();
  pending_ += tokenizer_.bytes(token);
  if (!may_stop) return true;
  size_t first = std::string::npos;
  for (const std::string& stop : stops_) {
    // It ends with this token: what was there before holds none, or was to go on through it.
    const size_t from = before - std::min(before, stop.size() - 1);
    first = std::min(first, pending_.find(stop, from));
  }
  if (first == std::string::npos) return true;
  pending_.resize(first);
  stopped_ = true;
  return false;
}

// Where the longest end of the pending text begins that may become a stop string.
size_t CompletionText::beginning_of_a_stop() const {
  size_t begin = pending_.size();
  for (const std::string& stop : stops_) {
    for (size_t length = std::min(stop.size() - 1, pending_.size()); length > 0; --length) {
      if (!std::string_view(pending_).ends_with(std::string_view(stop).substr(0, length))) continue;
      begin = std::min(begin, pending_.size() - length);
      break;
    }
  }
  return begin;
}

std::string CompletionText::take() {
  if (stopped_) return take_rest();
  const size_t certain =
      complete_length(std::string_view(pending_).substr(0, beginning_of_a_stop()));
  std::string text = valid_utf8(std::string_view(pending_).substr(0, certain));
  pending_.erase(0, certain);
  return text;
}

std::string CompletionText::take_rest() {
  std::string text = valid_utf8(pending_);
  pending_.clear();
  return text;
}

}  // namespace sbtrain
