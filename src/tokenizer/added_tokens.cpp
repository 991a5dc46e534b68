#include "tokenizer/added_tokens.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>

#include "core/utf8.h"

namespace sbtrain {
namespace {

utf8proc_category_t category_of(std::string_view character) {
  return utf8proc_category(static_cast<utf8proc_int32_t>(code_point(character)));
}

// \w of Rust's regular expressions: letters, enclosed ones too, marks, decimal digits, connectors
// and the joiners.
bool is_word(std::string_view character) {
  const char32_t code = code_point(character);
  const utf8proc_category_t category = category_of(character);
  const bool letter = category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO;
  const bool mark = category >= UTF8PROC_CATEGORY_MN && category <= UTF8PROC_CATEGORY_ME;
  return letter || mark || category == UTF8PROC_CATEGORY_ND || category == UTF8PROC_CATEGORY_NL ||
         category == UTF8PROC_CATEGORY_PC || code == 0x200c || code == 0x200d ||
         (code >= 0x24b6 && code <= 0x24e9) || (code >= 0x1f130 && code <= 0x1f149) ||
         (code >= 0x1f150 && code <= 0x1f169) || (code >= 0x1f170 && code <= 0x1f189);
}

bool is_space(std::string_view character) {
  const char32_t code = code_point(character);
  const utf8proc_category_t category = category_of(character);
  return (code >= 9 && code <= 13) || code == 0x85 || category == UTF8PROC_CATEGORY_ZS ||
         category == UTF8PROC_CATEGORY_ZL || category == UTF8PROC_CATEGORY_ZP;
}

std::string_view first_character(std::string_view text) {
  return text.substr(0, character_length(text));
}

std::string_view last_character(std::string_view text) {
  size_t start = text.size() - 1;
  while ((static_cast<uint8_t>(text[start]) & 0xc0) == 0x80) --start;
  return text.substr(start);
}

size_t spaces_before(std::string_view text) {
  const size_t size = text.size();
  while (!text.empty() && is_space(last_character(text))) {
    text.remove_suffix(last_character(text).size());
  }
  return size - text.size();
}

size_t spaces_after(std::string_view text) {
  const size_t size = text.size();
  while (!text.empty() && is_space(first_character(text))) {
    text.remove_prefix(first_character(text).size());
  }
  return size - text.size();
}

bool stands_alone(std::string_view before, std::string_view after) {
  return (before.empty() || !is_word(last_character(before))) &&
         (after.empty() || !is_word(first_character(after)));
}

}  // namespace

AddedTokens::AddedTokens(std::vector<AddedToken> tokens, bool special)
    : tokens_(std::move(tokens)), trie_(1), first_bytes_(256), special_(special) {
  const auto is_special = [](const AddedToken& token) { return token.special; };
  if (!special && std::all_of(tokens_.begin(), tokens_.end(), is_special)) tokens_.clear();
  for (size_t i = 0; i < tokens_.size(); ++i) {
    const AddedToken& token = tokens_[i];
    int32_t node = 0;
    for (const char byte : token.content) {
      int32_t next = child(node, byte);
      if (next < 0) {
        next = static_cast<int32_t>(trie_.size());
        trie_[static_cast<size_t>(node)].children.emplace_back(byte, next);
        trie_.emplace_back();
      }
      node = next;
    }
    int32_t& end = trie_[static_cast<size_t>(node)].token;
    if (end < 0) end = static_cast<int32_t>(i);
    first_bytes_[static_cast<uint8_t>(token.content.front())] = 1;
    longest_bytes_ = std::max(longest_bytes_, token.content.size());
  }
}

int32_t AddedTokens::child(int32_t node, char byte) const {
  for (const auto& [key, next] : trie_[static_cast<size_t>(node)].children) {
    if (key == static_cast<uint8_t>(byte)) return next;
  }
  return -1;
}

const AddedToken* AddedTokens::longest(std::string_view text) const {
  const AddedToken* found = nullptr;
  int32_t node = 0;
  for (const char byte : text) {
    node = child(node, byte);
    if (node < 0) break;
    const int32_t token = trie_[static_cast<size_t>(node)].token;
    if (token >= 0) found = &tokens_[static_cast<size_t>(token)];
  }
  return found;
}

void AddedTokens::split(std::string_view text, const Emit& emit) const {
  size_t done = 0;       // bytes that are emitted
  size_t spaces_to = 0;  // where the white space ends that a token has taken last
  size_t at = tokens_.empty() ? text.size() : 0;
  while (at < text.size()) {
    const bool may_start = first_bytes_[static_cast<uint8_t>(text[at])] != 0;
    const AddedToken* token = may_start ? longest(text.substr(at)) : nullptr;
    if (token == nullptr) {
      ++at;
      continue;
    }
    size_t begin = at;
    size_t end = at + token->content.size();
    at = end;
    if (token->special && !special_) continue;
    if (token->single_word && !stands_alone(text.substr(0, begin), text.substr(end))) continue;
    // What a token before it has taken is not gone through again.
    if (token->rstrip) {
      end = end < spaces_to ? spaces_to : end + spaces_after(text.substr(end));
      spaces_to = end;
    }
    if (token->lstrip && begin > done) begin -= spaces_before(text.substr(done, begin - done));
    if (token->lstrip) begin = std::max(begin, done);
    end = std::max(begin, end);
    if (done < begin) emit(-1, text.substr(done, begin - done));
    emit(token->id, text.substr(begin, end - begin));
    done = end;
  }
  if (done < text.size()) emit(-1, text.substr(done));
}

bool AddedTokens::divides(std::string_view text, size_t at) const {
  if (tokens_.empty()) return false;
  const size_t start = at < longest_bytes_ ? 0 : at - longest_bytes_;
  for (size_t i = start; i < at; ++i) {
    const AddedToken* token = longest(text.substr(i));
    if (token != nullptr && i + token->content.size() > at) return true;
  }
  return false;
}

bool AddedTokens::looks_around() const {
  return std::any_of(tokens_.begin(), tokens_.end(), [](const AddedToken& token) {
    return token.single_word || token.lstrip || token.rstrip;
  });
}

}  // namespace sbtrain
