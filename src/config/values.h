// Values as text: what a file, an option or a variable may say, and how it is printed.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "core/fields.h"

namespace sbtrain::schema {

// Reads `text` into `value`; false when it does not hold such a value. Integers may be written with
// a point, an exponent or K, M, G, T (powers of 1000) as long as their value is whole: 1e12, 5M,
// 1.5K. Numbers are finite. A duration is a whole number and "steps" (which may be left out),
// "tokens" or "epochs". Flags are true and false.
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
// A list of texts, for which there is no such form, gives "[]".
std::string to_text(const Member& member);

// What messages and documentation call a value of a type.
struct TypeNames {
  const char* phrase;      // "a whole number", for messages
  const char* short_name;  // "integer", for documentation
};
constexpr TypeNames type_names(int64_t) {
  return {"a whole number", "integer"};
}
constexpr TypeNames type_names(uint64_t) {
  return {"a whole number", "integer"};
}
constexpr TypeNames type_names(double) {
  return {"a number", "number"};
}
constexpr TypeNames type_names(bool) {
  return {"true or false", "flag"};
}
constexpr TypeNames type_names(const Duration&) {
  return {"a duration such as '300 steps' or '2e9 tokens'", "duration"};
}
constexpr TypeNames type_names(const std::string&) {
  return {"text", "text"};
}

TypeNames type_names(const Member& member);

// The number that is compared with a rule's bounds.
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
// `offset` is that of the first byte that breaks this rule.
bool is_clean_text(std::string_view text, std::string_view allowed, size_t& offset);

// `text` as a message shows it: in quotes, one line, not too long.
std::string in_quotes(std::string_view text);

// The candidate that `word` is most likely a misspelling of; empty when none is near.
std::string nearest(std::string_view word, const std::vector<std::string>& candidates);

}  // namespace sbtrain::schema
