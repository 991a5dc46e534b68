// Decompresses gzip (RFC 1952) and Zstandard (RFC 8878) streams in bounded memory.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "text/byte_source.h"

namespace sbtrain {

enum class Compression { kNone, kGzip, kZstd };

// How a file is compressed that begins with `head` (4 bytes, or the whole file if it is shorter).
Compression compression_of(std::string_view head);

// The bytes that `source`, compressed in this way, stands for. Members (gzip) and frames
// (Zstandard) that follow each other are read one after the other; a gzip file may end with zeros,
// as on a tape. Names within gzip headers are ignored. Memory: 0.5 MiB, and for Zstandard the
// frame's window, up to 128 MiB.
//
// A read throws ExitCode::kData, with `name`, for data that is damaged, that ends early, that other
// bytes follow, that needs a larger window or a dictionary, and for data that no text compresses
// to: more than 8 MiB that are over 250 times as long as their compressed form.
std::unique_ptr<ByteSource> decompress(Compression compression, std::unique_ptr<ByteSource> source,
                                       const std::string& name);

}  // namespace sbtrain
