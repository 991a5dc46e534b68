// UTF-8 (RFC 3629) in text that may hold invalid bytes.
#pragma once

#include <cstddef>
#include <string_view>

namespace sbtrain {

// Length in bytes of the UTF-8 character that starts `text`, which is not empty; 0 if it is not
// valid.
size_t character_length(std::string_view text);

// Number of bytes at the start of `text` that are valid UTF-8.
size_t valid_length(std::string_view text);

// Number of bytes at the start of `text` that later bytes cannot change: all of them, but for a
// character at the end whose last bytes are still missing.
size_t complete_length(std::string_view text);

// The largest cut of at most `bytes` that falls between two characters of `text`, or, where bytes
// are invalid, at most 3 bytes before `bytes`.
size_t character_boundary(std::string_view text, size_t bytes);

// The code point of the character that starts `text`, which is valid.
char32_t code_point(std::string_view text);

}  // namespace sbtrain
