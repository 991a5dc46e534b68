#include "tokenizer/nfc.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include "core/error.h"
#include "core/utf8.h"

namespace sbtrain {
namespace {

// Characters below U+0300 are the same in form C, and none of them combines with the character
// before it. In UTF-8 these are the ones without a byte from 0xCC.
bool is_plain(char byte) {
  return static_cast<uint8_t>(byte) < 0xcc;
}

uint16_t combining_class(utf8proc_int32_t code) {
  return utf8proc_get_property(code)->combining_class;
}

// Canonical decomposition without the canonical order.
std::vector<utf8proc_int32_t> decompose(std::string_view text) {
  std::vector<utf8proc_int32_t> codes;
  std::array<utf8proc_int32_t, 16> parts{};
  for (size_t i = 0; i < text.size(); i += character_length(text.substr(i))) {
    int boundary = 0;
    const auto count = utf8proc_decompose_char(
        static_cast<utf8proc_int32_t>(code_point(text.substr(i))), parts.data(), parts.size(),
        static_cast<utf8proc_option_t>(UTF8PROC_DECOMPOSE | UTF8PROC_STABLE), &boundary);
    require(count >= 0 && count <= static_cast<utf8proc_ssize_t>(parts.size()),
            "a character decomposes into {} parts", count);
    codes.insert(codes.end(), parts.begin(), parts.begin() + count);
  }
  return codes;
}

// Puts the marks after each starter (a character of class 0) in the order of their classes.
// utf8proc's own order takes quadratic time for a long row of marks.
void order_marks(std::vector<utf8proc_int32_t>& codes) {
  const auto is_starter = [](utf8proc_int32_t code) { return combining_class(code) == 0; };
  auto from = codes.begin();
  while (from != codes.end()) {
    from = std::find_if_not(from, codes.end(), is_starter);
    const auto end = std::find_if(from, codes.end(), is_starter);
    std::stable_sort(from, end, [](utf8proc_int32_t a, utf8proc_int32_t b) {
      return combining_class(a) < combining_class(b);
    });
    from = end;
  }
}

void append_normalized(std::string_view text, std::string& out) {
  std::vector<utf8proc_int32_t> codes = decompose(text);
  order_marks(codes);
  const auto count =
      utf8proc_normalize_utf32(codes.data(), static_cast<utf8proc_ssize_t>(codes.size()),
                               static_cast<utf8proc_option_t>(UTF8PROC_COMPOSE | UTF8PROC_STABLE));
  require(count >= 0, "utf8proc cannot compose: {}", utf8proc_errmsg(count));
  std::array<utf8proc_uint8_t, 4> bytes{};
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
    const auto length = utf8proc_encode_char(codes[i], bytes.data());
    for (size_t k = 0; k < static_cast<size_t>(length); ++k) out += static_cast<char>(bytes[k]);
  }
}

}  // namespace

bool is_plain_nfc(std::string_view text) {
  return std::all_of(text.begin(), text.end(), is_plain);
}

NfcText to_nfc(std::string_view text) {
  NfcText result;
  result.text.reserve(text.size());
  size_t from = 0;
  while (from < text.size()) {
    // Plain characters, but for the last one if a mark may follow it.
    size_t other = from;
    while (other < text.size() && is_plain(text[other])) ++other;
    size_t start = other;
    if (other < text.size() && other > from) {
      do --start;
      while ((static_cast<uint8_t>(text[start]) & 0xc0) == 0x80);
    }
    if (start > from) {
      result.segments.push_back({from, result.text.size(), true});
      result.text += text.substr(from, start - from);
    }
    if (start == text.size()) break;
    size_t end = other;
    while (end < text.size() && !is_plain(text[end])) end += character_length(text.substr(end));
    result.segments.push_back({start, result.text.size(), false});
    append_normalized(text.substr(start, end - start), result.text);
    from = end;
  }
  return result;
}

}  // namespace sbtrain
