#include "config/values.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

namespace sbtrain::schema {
namespace {

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

std::string_view trim(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

// Takes the power of ten of a trailing K, M, G or T off `text`.
int take_suffix(std::string_view& text) {
  constexpr std::string_view kSuffixes = "KMGT";
  if (text.empty()) return 0;
  const size_t found = kSuffixes.find(text.back());
  if (found == std::string_view::npos) return 0;
  text.remove_suffix(1);
  return 3 * (static_cast<int>(found) + 1);
}

// Takes the exponent off `text`; false when it is malformed. Huge ones are clamped.
bool take_exponent(std::string_view& text, int& exponent) {
  const size_t at = text.find_first_of("eE");
  if (at == std::string_view::npos) return true;
  std::string_view digits = text.substr(at + 1);
  text = text.substr(0, at);
  const bool negative = !digits.empty() && digits.front() == '-';
  if (!digits.empty() && (digits.front() == '-' || digits.front() == '+')) digits.remove_prefix(1);
  if (digits.empty() || !std::ranges::all_of(digits, is_digit)) return false;
  int value = 0;
  for (char c : digits) value = std::min(value * 10 + (c - '0'), 100000);
  exponent += negative ? -value : value;
  return true;
}

// An exact decimal without a sign: digits[.digits][e[+-]digits][KMGT]. False unless it is a
// whole number below 2^64.
bool parse_whole(std::string_view text, uint64_t& value) {
  int exponent = take_suffix(text);
  if (!take_exponent(text, exponent)) return false;
  std::string digits;
  bool point = false;
  for (char c : text) {
    if (c == '.' && !point) {
      point = true;
    } else if (is_digit(c)) {
      digits += c;
      if (point) --exponent;
    } else {
      return false;
    }
  }
  if (digits.empty()) return false;
  for (; exponent < 0 && digits.size() > 1 && digits.back() == '0'; ++exponent) digits.pop_back();
  value = 0;
  for (char c : digits) {
    if (__builtin_mul_overflow(value, uint64_t{10}, &value)) return false;
    if (__builtin_add_overflow(value, static_cast<uint64_t>(c - '0'), &value)) return false;
  }
  if (value == 0) return true;
  if (exponent < 0) return false;
  for (; exponent > 0; --exponent) {
    if (__builtin_mul_overflow(value, uint64_t{10}, &value)) return false;
  }
  return true;
}

// 250e9 for 250000000000: short and exact.
std::string short_count(int64_t count) {
  int exponent = 0;
  int64_t rest = count;
  for (; rest != 0 && rest % 1000 == 0; rest /= 1000) exponent += 3;
  return exponent >= 6 ? fmt::format("{}e{}", rest, exponent) : fmt::format("{}", count);
}

// The length of the UTF-8 sequence at the start of `text`; 0 when it is malformed.
size_t utf8_length(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return 1;
  const size_t length = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4 || text.size() < length) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
  }
  // Overlong forms, surrogates, and code points above U+10FFFF.
  if (first == 0xE0 && byte(1) < 0xA0) return 0;
  if (first == 0xED && byte(1) > 0x9F) return 0;
  if (first == 0xF0 && byte(1) < 0x90) return 0;
  if (first == 0xF4 && byte(1) > 0x8F) return 0;
  return length;
}

// Edits (insert, delete, replace, swap neighbours) between two words.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<size_t>> d(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) d[i][0] = i;
  for (size_t j = 0; j <= b.size(); ++j) d[0][j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    for (size_t j = 1; j <= b.size(); ++j) {
      d[i][j] =
          std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
      }
    }
  }
  return d[a.size()][b.size()];
}

}  // namespace

bool from_text(std::string_view text, uint64_t& value) {
  text = trim(text);
  if (!text.empty() && text.front() == '+') text.remove_prefix(1);
  uint64_t parsed = 0;
  if (!parse_whole(text, parsed)) return false;
  value = parsed;
  return true;
}

bool from_text(std::string_view text, int64_t& value) {
  text = trim(text);
  const bool negative = !text.empty() && text.front() == '-';
  if (negative || (!text.empty() && text.front() == '+')) text.remove_prefix(1);
  uint64_t parsed = 0;
  if (!parse_whole(text, parsed)) return false;
  if (parsed > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return false;
  value = negative ? -static_cast<int64_t>(parsed) : static_cast<int64_t>(parsed);
  return true;
}

bool from_text(std::string_view text, double& value) {
  text = trim(text);
  if (!text.empty() && text.front() == '+') {
    text.remove_prefix(1);
    if (!text.empty() && text.front() == '-') return false;
  }
  double parsed = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), parsed);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(parsed)) {
    return false;
  }
  value = parsed;
  return true;
}

bool from_text(std::string_view text, bool& value) {
  text = trim(text);
  if (text != "true" && text != "false") return false;
  value = text == "true";
  return true;
}

bool from_text(std::string_view text, Duration& value) {
  text = trim(text);
  Duration parsed;
  for (const auto& [word, unit] :
       {std::pair{"steps", Duration::Unit::kSteps}, std::pair{"step", Duration::Unit::kSteps},
        std::pair{"tokens", Duration::Unit::kTokens}, std::pair{"token", Duration::Unit::kTokens},
        std::pair{"epochs", Duration::Unit::kEpochs},
        std::pair{"epoch", Duration::Unit::kEpochs}}) {
    if (!text.ends_with(word)) continue;
    text.remove_suffix(std::string_view(word).size());
    parsed.unit = unit;
    break;
  }
  if (!from_text(text, parsed.count)) return false;
  value = parsed;
  return true;
}

bool from_text(std::string_view text, std::string& value) {
  size_t offset = 0;
  if (!is_clean_text(text, "", offset)) return false;
  value = text;
  return true;
}

std::string to_text(int64_t value) {
  return fmt::format("{}", value);
}
std::string to_text(uint64_t value) {
  return fmt::format("{}", value);
}
std::string to_text(double value) {
  return fmt::format("{}", value);
}
std::string to_text(bool value) {
  return value ? "true" : "false";
}
std::string to_text(const Duration& value) {
  const char* unit = value.unit == Duration::Unit::kSteps    ? "steps"
                     : value.unit == Duration::Unit::kTokens ? "tokens"
                                                             : "epochs";
  return fmt::format("{} {}", short_count(value.count), unit);
}
std::string to_text(const std::string& value) {
  return value;
}
std::string to_text(const Member& member) {
  const auto text = [](const auto& value) {
    using T = std::decay_t<decltype(value)>;
    if constexpr (std::is_same_v<T, EnumMember>) {
      return std::string(value.get());
    } else if constexpr (std::is_same_v<T, std::vector<std::string>*>) {
      return std::string("[]");
    } else {
      return to_text(*value);
    }
  };
  return std::visit(text, member);
}

TypeNames type_names(const Member& member) {
  const auto names = [](const auto& value) -> TypeNames {
    using T = std::decay_t<decltype(value)>;
    if constexpr (std::is_same_v<T, EnumMember>) {
      return {"a word", "choice"};
    } else if constexpr (std::is_same_v<T, std::vector<std::string>*>) {
      return {"a list of texts", "list of text"};
    } else {
      return type_names(*value);
    }
  };
  return std::visit(names, member);
}

bool is_clean_text(std::string_view text, std::string_view allowed, size_t& offset) {
  for (offset = 0; offset < text.size();) {
    const char c = text[offset];
    const bool control = static_cast<unsigned char>(c) < 0x20 || c == 0x7F;
    if (control && allowed.find(c) == std::string_view::npos) return false;
    const size_t length = utf8_length(text.substr(offset));
    if (length == 0) return false;
    offset += length;
  }
  return true;
}

std::string in_quotes(std::string_view text) {
  constexpr size_t kLongest = 80;
  std::string shown = "'";
  for (size_t i = 0; i < std::min(text.size(), kLongest);) {
    const size_t length = utf8_length(text.substr(i));
    const auto byte = static_cast<unsigned char>(text[i]);
    if (length == 0 || byte < 0x20 || byte == 0x7F) {
      shown += fmt::format("\\x{:02x}", static_cast<unsigned>(byte));
      ++i;
    } else {
      shown += text.substr(i, length);
      i += length;
    }
  }
  return shown + (text.size() > kLongest ? "...'" : "'");
}

std::string nearest(std::string_view word, const std::vector<std::string>& candidates) {
  constexpr size_t kLongest = 128;  // longer words are not taken for misspellings
  if (word.empty() || word.size() > kLongest) return "";
  // A third of the word may be wrong, but never all of it.
  size_t best = std::min(word.size(), std::max<size_t>(2, word.size() / 3) + 1);
  std::string result;
  for (const std::string& candidate : candidates) {
    const size_t distance = edit_distance(word, candidate);
    if (distance >= best) continue;
    best = distance;
    result = candidate;
  }
  return result;
}

}  // namespace sbtrain::schema
