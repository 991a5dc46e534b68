#include "core/utf8.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace sbtrain {
namespace {

uint8_t byte_at(std::string_view text, size_t i) {
  return static_cast<uint8_t>(text[i]);
}

bool continues_character(uint8_t byte) {
  return (byte & 0xc0) == 0x80;
}

// Bytes of a character with this first byte.
size_t length_of(uint8_t lead) {
  return lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : lead >= 0xc0 ? 2 : 1;
}

}  // namespace

size_t character_length(std::string_view text) {
  const uint8_t lead = byte_at(text, 0);
  if (lead < 0x80) return 1;
  const size_t length = length_of(lead);
  if (lead < 0xc2 || lead > 0xf4 || text.size() < length) return 0;
  for (size_t i = 1; i < length; ++i) {
    if (!continues_character(byte_at(text, i))) return 0;
  }
  const uint8_t second = byte_at(text, 1);
  const bool overlong = (lead == 0xe0 && second < 0xa0) || (lead == 0xf0 && second < 0x90);
  const bool surrogate = lead == 0xed && second >= 0xa0;
  const bool too_large = lead == 0xf4 && second >= 0x90;
  return overlong || surrogate || too_large ? 0 : length;
}

size_t valid_length(std::string_view text) {
  size_t i = 0;
  while (i < text.size()) {
    uint64_t word = 0;
    if (i + sizeof word <= text.size()) {
      std::memcpy(&word, &text[i], sizeof word);
      if ((word & 0x8080808080808080u) == 0) {  // eight ASCII characters
        i += sizeof word;
        continue;
      }
    }
    const size_t length = character_length(text.substr(i));
    if (length == 0) return i;
    i += length;
  }
  return i;
}

size_t complete_length(std::string_view text) {
  for (size_t back = 1; back <= std::min<size_t>(3, text.size()); ++back) {
    const uint8_t byte = byte_at(text, text.size() - back);
    if (continues_character(byte)) continue;
    return length_of(byte) > back ? text.size() - back : text.size();
  }
  return text.size();
}

size_t character_boundary(std::string_view text, size_t bytes) {
  if (bytes >= text.size()) return text.size();
  size_t end = bytes;
  while (end > 0 && end + 3 > bytes && continues_character(byte_at(text, end))) --end;
  return end;
}

char32_t code_point(std::string_view text) {
  const uint8_t lead = byte_at(text, 0);
  const size_t length = length_of(lead);
  char32_t code = length == 1 ? lead : lead & (0xff >> (length + 1));
  for (size_t i = 1; i < length; ++i) code = code << 6 | (byte_at(text, i) & 0x3f);
  return code;
}

}  // namespace sbtrain
