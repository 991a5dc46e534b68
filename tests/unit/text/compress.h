// Compressed bytes for tests of readers.
#pragma once

#include <zlib.h>
#include <zstd.h>

#include <string>
#include <string_view>

namespace sbtrain::test {

// One gzip member, with `name` in its header where that is not empty.
inline std::string gzip(std::string_view text, const std::string& name = "", int level = 6) {
  z_stream stream{};
  constexpr int kGzipHeader = 16;
  deflateInit2(&stream, level, Z_DEFLATED, MAX_WBITS + kGzipHeader, 8, Z_DEFAULT_STRATEGY);
  std::string file_name = name;
  gz_header header{};
  header.name = reinterpret_cast<Bytef*>(file_name.data());
  if (!name.empty()) deflateSetHeader(&stream, &header);
  std::string result(deflateBound(&stream, text.size()) + name.size() + 64, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(result.data());
  stream.avail_out = static_cast<uInt>(result.size());
  deflate(&stream, Z_FINISH);
  result.resize(stream.total_out);
  deflateEnd(&stream);
  return result;
}

// One Zstandard frame.
inline std::string zstd(std::string_view text, int level = 3) {
  std::string result(ZSTD_compressBound(text.size()), '\0');
  result.resize(ZSTD_compress(result.data(), result.size(), text.data(), text.size(), level));
  return result;
}

}  // namespace sbtrain::test
