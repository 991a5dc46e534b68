// Recognises files that are not text by their first bytes.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace sbtrain {

inline constexpr size_t kFormatBytes = 8192;  // enough to tell text from other formats

// For a file that is not UTF-8 text: its format and what to do with it, as the end of a sentence
// that starts with the file's name. Empty for text. `head` is the file's first kFormatBytes bytes,
// or the whole file if it is shorter.
std::string foreign_format(std::string_view head, std::string_view path);

}  // namespace sbtrain
