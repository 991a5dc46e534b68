#include "data/text_format.h"

#include <algorithm>
#include <array>

namespace sbtrain {
namespace {

using namespace std::string_view_literals;

struct Signature {
  size_t offset;
  std::string_view bytes;
  const char* format;
};

// UTF-32 stands before UTF-16, because their byte order marks begin alike.
constexpr std::array kSignatures = {
    Signature{0, "PAR1"sv, "a Parquet file: write its texts to .jsonl first"},
    Signature{0, "ARROW1"sv, "an Arrow file: write its texts to .jsonl first"},
    Signature{0, "\x1f\x8b"sv, "compressed by gzip: decompress it first (gunzip)"},
    Signature{0, "\x28\xb5\x2f\xfd"sv, "compressed by zstd: decompress it first (unzstd)"},
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

}  // namespace

std::string foreign_format(std::string_view head, std::string_view path) {
  for (const Signature& s : kSignatures) {
    if (head.size() >= s.offset && head.substr(s.offset).starts_with(s.bytes)) return s.format;
  }
  const std::string_view text = head.starts_with("\xef\xbb\xbf") ? head.substr(3) : head;
  if (is_json_array(text)) {
    return "a JSON array: give .jsonl with one object on each line (jq -c '.[]' converts it)";
  }
  if (path.ends_with(".json")) {
    return "JSON: give .jsonl with one object on each line (jq -c converts it), or name it .txt "
           "if its text is meant";
  }
  if (head.find('\0') == std::string_view::npos) return "";
  return is_utf16(head) ? "UTF-16 text: convert it to UTF-8 first (iconv -f UTF-16)"
                        : "binary, not text (it has NUL bytes)";
}

}  // namespace sbtrain
