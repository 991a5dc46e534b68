// Documents in text: a line of JSON each, or a whole file.
#pragma once

#include <cstddef>
#include <memory>

#include "text/byte_source.h"
#include "text/document.h"

namespace sbtrain {

inline constexpr size_t kMaxRecordBytes = size_t{64} << 20;  // of a line or row
inline constexpr size_t kTextPartBytes = size_t{256} << 10;

// Each line that is not blank is a document (kJson). `origin` has to live as long as the reader and
// its documents. A line of more than kMaxRecordBytes is a document with a problem.
std::unique_ptr<RecordReader> read_lines(std::unique_ptr<ByteSource> source,
                                         const DocumentOrigin& origin);

// All of the text is one document, which comes in parts (kText) of up to kTextPartBytes. A part
// ends after a newline if it has one, and never inside a UTF-8 character. next() throws
// ExitCode::kData for text that is not UTF-8.
std::unique_ptr<RecordReader> read_text(std::unique_ptr<ByteSource> source,
                                        const DocumentOrigin& origin);

// The bytes of a source that are at hand, for readers that look for an end among them.
class ByteWindow {
 public:
  explicit ByteWindow(std::unique_ptr<ByteSource> source) : source_(std::move(source)) {}

  // Reads until `wanted` bytes are in the window; returns false if the source ends before.
  bool fill(size_t wanted);
  std::string_view bytes() const { return std::string_view(buffer_).substr(at_); }
  void consume(size_t bytes) { at_ += bytes; }
  // Whether the source has no more bytes than those of the window. Known after fill().
  bool at_end() const { return at_end_; }

 private:
  std::unique_ptr<ByteSource> source_;
  std::string buffer_;
  size_t at_ = 0;  // from here on the buffer has not been consumed
  bool at_end_ = false;
};

}  // namespace sbtrain
