#include "text/text_format.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/utf8.h"
#include "text/token_file.h"

namespace sbtrain {
namespace {

using namespace std::string_view_literals;

struct Signature {
  size_t offset;
  std::string_view bytes;
  const char* format;
};

constexpr const char* kPickle = "Python objects in a pickle file, not text";
constexpr const char* kGguf = "weights in a GGUF file, not text";

// UTF-32 stands before UTF-16, because their byte order marks begin alike.
constexpr std::array kSignatures = {
    Signature{0, "ARROW1"sv, "an Arrow file: write its texts to .jsonl first"},
    Signature{0, "\x1f\x8b"sv,
              "compressed by gzip within a compressed file: decompress it first (gunzip)"},
    Signature{0, "\x28\xb5\x2f\xfd"sv,
              "compressed by zstd within a compressed file: decompress it first (unzstd)"},
    Signature{0,
              "\xfd"
              "7zXZ\0"sv,
              "compressed by xz: decompress it first (unxz)"},
    Signature{0, "BZh"sv, "compressed by bzip2: decompress it first (bunzip2)"},
    Signature{0, "\x04\x22\x4d\x18"sv, "compressed by lz4: decompress it first (unlz4)"},
    Signature{0, "PK\x03\x04"sv, "a zip archive: unpack it first"},
    Signature{0, "7z\xbc\xaf\x27\x1c"sv, "a 7z archive: unpack it first"},
    Signature{257, "ustar"sv, "a tar archive: unpack it first"},
    Signature{0, "%PDF-"sv, "a PDF file: extract its text first"},
    Signature{0, "\x89HDF\r\n"sv, "an HDF5 file, not text (a store is prepared already)"},
    Signature{0, "\x93NUMPY"sv, "a NumPy array, not text"},
    Signature{0, "\x80\x02"sv, kPickle},
    Signature{0, "\x80\x03"sv, kPickle},
    Signature{0, "\x80\x04"sv, kPickle},
    Signature{0, "\x80\x05"sv, kPickle},
    // The length of the header, which is below 2^40, and the header.
    Signature{5, "\0\0\0{\""sv, "weights in a safetensors file, not text"},
    Signature{0, "GGUF\1\0\0\0"sv, kGguf},
    Signature{0, "GGUF\2\0\0\0"sv, kGguf},
    Signature{0, "GGUF\3\0\0\0"sv, kGguf},
    Signature{0, "\x89PNG\r\n\x1a\n"sv, "a PNG image, not text"},
    Signature{0, "\xff\xd8\xff"sv, "a JPEG image, not text"},
    Signature{0, "GIF87a"sv, "a GIF image, not text"},
    Signature{0, "GIF89a"sv, "a GIF image, not text"},
    Signature{0,
              "\x7f"
              "ELF"sv,
              "an ELF program or library, not text"},
    Signature{0, "SQLite format 3\0"sv, "an SQLite database, not text"},
    Signature{0, "\xff\xfe\0\0"sv, "UTF-32 text: convert it to UTF-8 first (iconv -f UTF-32)"},
    Signature{0, "\0\0\xfe\xff"sv, "UTF-32 text: convert it to UTF-8 first (iconv -f UTF-32)"},
    Signature{0, "\xff\xfe"sv, "UTF-16 text: convert it to UTF-8 first (iconv -f UTF-16)"},
    Signature{0, "\xfe\xff"sv, "UTF-16 text: convert it to UTF-8 first (iconv -f UTF-16)"},
};

std::string_view without_space(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of(" \t\r\n"), text.size()));
  return text;
}

// Whether the text begins with an array of objects.
bool is_json_array(std::string_view text) {
  text = without_space(text);
  if (!text.starts_with('[')) return false;
  text = without_space(text.substr(1));
  return text.starts_with('{') && without_space(text.substr(1)).starts_with('"');
}

// In UTF-16, alphabetic text has a NUL as one byte of nearly every character.
bool is_utf16(std::string_view head) {
  size_t even = 0;
  size_t odd = 0;
  for (size_t i = 0; i < head.size(); ++i) {
    if (head[i] == '\0') ++(i % 2 == 0 ? even : odd);
  }
  const size_t pairs = head.size() / 2;
  return pairs > 0 && std::min(even, odd) * 20 <= pairs && std::max(even, odd) * 2 > pairs;
}

// Whether the text begins with a line that holds a JSON object, or with the first part of one.
bool is_json_lines(std::string_view text, bool whole_file) {
  text = without_space(text);
  const size_t end = text.find('\n');
  const std::string_view line = text.substr(0, end);
  if (!line.starts_with('{')) return false;
  if (end != std::string_view::npos || whole_file) return nlohmann::json::accept(line);
  const std::string_view inside = without_space(line.substr(1));
  return inside.starts_with('"') || inside.starts_with('}');
}

// Why this is no text; empty if it may be.
std::string binary_problem(std::string_view head) {
  if (head.find('\0') == std::string_view::npos) return "";
  return is_utf16(head) ? "UTF-16 text: convert it to UTF-8 first (iconv -f UTF-16)"
                        : "binary, not text (it has NUL bytes)";
}

// Why this is not UTF-8; empty if it is.
std::string encoding_problem(std::string_view head) {
  const size_t valid = valid_length(head);
  // The head may end inside a character, which has up to 4 bytes.
  if (valid == head.size() || (head.size() == kFormatBytes && valid + 4 > head.size())) return "";
  return not_utf8(static_cast<uint8_t>(head[valid]), static_cast<int64_t>(valid));
}

}  // namespace

std::string not_utf8(uint8_t byte, int64_t offset) {
  return fmt::format(
      "not UTF-8 (byte 0x{:02x} at offset {}): convert it first (iconv -f WINDOWS-1252 -t UTF-8, "
      "or what its encoding is), or drop such bytes (iconv -c -f UTF-8 -t UTF-8)",
      byte, offset);
}

std::string_view uncompressed_name(std::string_view path) {
  for (const std::string_view suffix : {".gz", ".gzip", ".zst", ".zstd"}) {
    if (path.ends_with(suffix)) return path.substr(0, path.size() - suffix.size());
  }
  return path;
}

InputFormat format_of_name(std::string_view path) {
  constexpr std::pair<std::string_view, InputFormat> kExtensions[] = {
      {".jsonl", InputFormat::kJsonLines}, {".ndjson", InputFormat::kJsonLines},
      {".json", InputFormat::kJsonLines},  {".txt", InputFormat::kText},
      {".text", InputFormat::kText},       {".md", InputFormat::kText},
      {".rst", InputFormat::kText},        {".parquet", InputFormat::kParquet},
      {".bin", InputFormat::kLlmC}};
  for (const auto& [extension, format] : kExtensions) {
    if (path.ends_with(extension)) return format;
  }
  return InputFormat::kAuto;
}

Recognised recognise(std::string_view head, std::string_view path, InputFormat wanted) {
  const auto refuse = [](std::string problem) { return Recognised{.problem = std::move(problem)}; };
  const bool llmc = llmc_model(head) != nullptr;
  if (llmc && (wanted == InputFormat::kAuto || wanted == InputFormat::kLlmC)) {
    return {.format = InputFormat::kLlmC};
  }
  if (llmc) return refuse("tokens with llm.c's header: give --format llmc, or none");
  if (wanted == InputFormat::kLlmC) {
    return refuse("it does not begin with llm.c's header (20240520 version 1, 20240801 version 7)");
  }
  if (wanted == InputFormat::kNanoGpt) return {.format = wanted};
  const bool parquet = head.starts_with("PAR1");
  if (parquet && (wanted == InputFormat::kAuto || wanted == InputFormat::kParquet)) {
    return {.format = InputFormat::kParquet};
  }
  if (parquet) return refuse("a Parquet file: give --format parquet, or none");
  const InputFormat named = wanted == InputFormat::kAuto ? format_of_name(path) : wanted;
  if (named == InputFormat::kParquet) {
    return refuse("not a Parquet file, which begins with PAR1; if it is text, rename it");
  }
  for (const Signature& s : kSignatures) {
    if (head.size() >= s.offset && head.substr(s.offset).starts_with(s.bytes)) {
      return refuse(s.format);
    }
  }
  if (std::string problem = binary_problem(head); !problem.empty()) {
    if (path.ends_with(".bin")) problem += "; --format nanogpt reads tokens without a header";
    return refuse(std::move(problem));
  }
  // Of JSON lines the parser says where one is not UTF-8.
  const auto plain_text = [&] {
    return Recognised{.format = InputFormat::kText, .problem = encoding_problem(head)};
  };
  if (wanted == InputFormat::kText) return plain_text();
  const std::string_view text = head.starts_with("\xef\xbb\xbf") ? head.substr(3) : head;
  if (is_json_array(text)) {
    return refuse(
        "a JSON array: give .jsonl with one object on each line (jq -c '.[]' converts it)");
  }
  const bool lines = is_json_lines(text, head.size() < kFormatBytes);
  if (path.ends_with(".json") && wanted == InputFormat::kAuto && !lines) {
    return refuse(
        "JSON that is not one object on each line: convert it (jq -c), or give --format text if "
        "its characters are meant");
  }
  if (named == InputFormat::kText) return plain_text();
  return lines || named == InputFormat::kJsonLines ? Recognised{.format = InputFormat::kJsonLines}
                                                   : plain_text();
}

}  // namespace sbtrain
