// Values as text: what a file, an option or a variable may say, and how we print it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "config/config.h"

namespace sbtrain::schema {

// Reads `text` into `value`; false when it does not say such a value. Integers may be written with
// a point, an exponent or K, M, G, T (powers of 1000) as long as they come out whole: 1e12, 5M,
// 1.5K. Numbers are finite. A duration is a whole number and "steps" (which may be left out) or
// "tokens". Flags are true and false.
bool from_text(std::string_view text, int64_t& value);
bool from_text(std::string_view text, uint64_t& value);
bool from_text(std::string_view text, double& value);
bool from_text(std::string_view text, bool& value);
bool from_text(std::string_view text, Duration& value);
bool from_text(std::string_view text, std::string& value);

// The shortest text that from_text reads back to the same value.
std::string to_text(int64_t value);
std::string to_text(uint64_t value);
std::string to_text(double value);
std::string to_text(bool value);
std::string to_text(const Duration& value);
std::string to_text(const std::string& value);

// "a whole number", for messages; "integer", for documentation.
template <class T>
struct TypeNames;
template <>
struct TypeNames<int64_t> {
  static constexpr const char* kPhrase = "a whole number";
  static constexpr const char* kShort = "integer";
};
template <>
struct TypeNames<uint64_t> {
  static constexpr const char* kPhrase = "a whole number";
  static constexpr const char* kShort = "integer";
};
template <>
struct TypeNames<double> {
  static constexpr const char* kPhrase = "a number";
  static constexpr const char* kShort = "number";
};
template <>
struct TypeNames<bool> {
  static constexpr const char* kPhrase = "true or false";
  static constexpr const char* kShort = "flag";
};
template <>
struct TypeNames<Duration> {
  static constexpr const char* kPhrase = "a duration such as '300 steps' or '2e9 tokens'";
  static constexpr const char* kShort = "duration";
};
template <>
struct TypeNames<std::string> {
  static constexpr const char* kPhrase = "text";
  static constexpr const char* kShort = "text";
};

// What a rule's bounds are checked against.
template <class T>
double magnitude(const T& value) {
  if constexpr (std::is_same_v<T, Duration>) {
    return static_cast<double>(value.count);
  } else if constexpr (std::is_arithmetic_v<T>) {
    return static_cast<double>(value);
  } else {
    return 0;
  }
}

// True when `text` is UTF-8 without control characters other than those in `allowed`; otherwise
// `offset` is that of the first byte that is not.
bool is_clean_text(std::string_view text, std::string_view allowed, size_t& offset);

// `text` as a message shows it: in quotes, one line, not too long.
std::string in_quotes(std::string_view text);

// The candidate that `word` is most likely a misspelling of; empty when none is near.
std::string nearest(std::string_view word, const std::vector<std::string>& candidates);

}  // namespace sbtrain::schema
