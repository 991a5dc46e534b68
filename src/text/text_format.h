// Recognises what a file holds by its first bytes and its name.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/enum_names.h"

namespace sbtrain {

enum class InputFormat {
  kAuto,       // to be recognised
  kText,       // UTF-8, the file is one document
  kJsonLines,  // UTF-8, an object on each line is one document
  kParquet,    // a row is one document
  kLlmC,       // token ids behind llm.c's header
  kNanoGpt     // token ids without a header, as uint16
};

template <>
inline constexpr auto kNames<InputFormat> =
    enum_names<InputFormat>({{InputFormat::kAuto, "auto"},
                             {InputFormat::kText, "text"},
                             {InputFormat::kJsonLines, "jsonl"},
                             {InputFormat::kParquet, "parquet"},
                             {InputFormat::kLlmC, "llmc"},
                             {InputFormat::kNanoGpt, "nanogpt"}});

inline bool holds_tokens(InputFormat format) {
  return format == InputFormat::kLlmC || format == InputFormat::kNanoGpt;
}

inline constexpr size_t kFormatBytes = 8192;  // enough to tell text from other formats

// The name without the suffix of a compressed file (.gz, .gzip, .zst, .zstd).
std::string_view uncompressed_name(std::string_view path);

// The formats that a name suggests, kAuto if it suggests none. `path` is an uncompressed name.
InputFormat format_of_name(std::string_view path);

struct Recognised {
  InputFormat format = InputFormat::kAuto;
  // Why the file cannot be read, and what to do with it, as the end of a sentence that starts with
  // its name; empty if it can.
  std::string problem{};
};

// Content decides where it can: a table or an array of tokens is what it is under any name. Among
// text, .jsonl, .ndjson and the extensions of plain text decide; under other names a file whose
// first line is a JSON object is JSON lines. `head` is the file's first kFormatBytes bytes,
// decompressed, or the whole file if it is shorter; `path` is an uncompressed name, "" for a pipe.
// `wanted` is kAuto, or the format that the file has to have.
Recognised recognise(std::string_view head, std::string_view path, InputFormat wanted);

// What to say of a file with such a byte at this offset.
std::string not_utf8(uint8_t byte, int64_t offset);

}  // namespace sbtrain
