#include "text/text_reader.h"

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "core/error.h"
#include "core/utf8.h"
#include "text/text_format.h"

namespace sbtrain {

bool ByteWindow::fill(size_t wanted) {
  constexpr size_t kReadBytes = size_t{1} << 20;
  if (at_ > kReadBytes) {
    buffer_.erase(0, at_);
    at_ = 0;
  }
  while (!at_end_ && buffer_.size() - at_ < wanted) {
    const size_t before = buffer_.size();
    buffer_.resize(before + kReadBytes);
    const size_t got = source_->read(buffer_.data() + before, kReadBytes);
    buffer_.resize(before + got);
    at_end_ = got == 0;
  }
  return buffer_.size() - at_ >= wanted;
}

namespace {

// Some programs begin files with it. It says that they are UTF-8 and is no part of the text.
constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";

class LineReader final : public RecordReader {
 public:
  LineReader(std::unique_ptr<ByteSource> source, const DocumentOrigin& origin)
      : window_(std::move(source)), origin_(origin) {}

  bool next(RawDocument& document) override {
    while (next_line(document)) {
      if (document.data.find_first_not_of(" \t\r") != std::string::npos) return true;
    }
    return false;
  }

 private:
  bool next_line(RawDocument& document) {
    finish_long_line();
    size_t end = std::string_view::npos;
    for (size_t seen = 0; end == std::string_view::npos; seen = window_.bytes().size()) {
      if (seen > kMaxRecordBytes) return begin_long_line(document);
      const bool more = window_.fill(seen + 1);
      end = window_.bytes().find('\n', seen);
      if (!more && end == std::string_view::npos) end = window_.bytes().size();
    }
    const std::string_view bytes = window_.bytes();
    if (bytes.empty()) return false;
    document = {.kind = RawDocument::Kind::kJson,
                .data = std::string(bytes.substr(0, end)),
                .origin = &origin_,
                .position = ++line_};
    window_.consume(std::min(end + 1, bytes.size()));
    return true;
  }

  bool begin_long_line(RawDocument& document) {
    document = {.kind = RawDocument::Kind::kJson,
                .data = "too long",
                .origin = &origin_,
                .position = ++line_,
                .problem = fmt::format(
                    "a line of more than {} MiB; split the document, or give it as a plain text "
                    "file, which may have any length",
                    kMaxRecordBytes >> 20)};
    in_long_line_ = true;
    return true;
  }
  // Passes over the rest of a line without keeping it.
  void finish_long_line() {
    while (in_long_line_ && (!window_.bytes().empty() || window_.fill(1))) {
      const size_t end = window_.bytes().find('\n');
      in_long_line_ = end == std::string_view::npos;
      window_.consume(in_long_line_ ? window_.bytes().size() : end + 1);
    }
  }

  ByteWindow window_;
  const DocumentOrigin& origin_;
  int64_t line_ = 0;
  bool in_long_line_ = false;  // whose rest is still to be passed over
};

// The length of a part of `text` that may have up to `limit` bytes.
size_t part_end(std::string_view text, size_t limit) {
  if (text.size() <= limit) return text.size();
  const size_t newline = text.substr(0, limit).rfind('\n');
  if (newline != std::string_view::npos) return newline + 1;
  return character_boundary(text, limit);
}

class TextReader final : public RecordReader {
 public:
  TextReader(std::unique_ptr<ByteSource> source, const DocumentOrigin& origin)
      : window_(std::move(source)), origin_(origin) {}

  bool next(RawDocument& document) override {
    if (started_ && window_.at_end() && window_.bytes().empty()) return false;
    // One byte more than a part shows whether the part is the last.
    window_.fill(kTextPartBytes + kByteOrderMark.size() + 1);
    if (!started_ && window_.bytes().starts_with(kByteOrderMark)) skip(kByteOrderMark.size());
    const std::string_view text = window_.bytes();
    const std::string_view part = text.substr(0, part_end(text, kTextPartBytes));
    if (const size_t valid = valid_length(part); valid < part.size()) {
      fail(ExitCode::kData, "{}: {}", origin_.name,
           not_utf8(static_cast<uint8_t>(part[valid]), offset_ + static_cast<int64_t>(valid)));
    }
    document = {.kind = RawDocument::Kind::kText,
                .data = std::string(part),
                .origin = &origin_,
                .first = !started_,
                .last = part.size() == text.size()};
    skip(part.size());
    started_ = true;
    return true;
  }

 private:
  void skip(size_t bytes) {
    offset_ += static_cast<int64_t>(bytes);
    window_.consume(bytes);
  }

  ByteWindow window_;
  const DocumentOrigin& origin_;
  int64_t offset_ = 0;
  bool started_ = false;  // a part has been returned
};

}  // namespace

std::unique_ptr<RecordReader> read_lines(std::unique_ptr<ByteSource> source,
                                         const DocumentOrigin& origin) {
  return std::make_unique<LineReader>(std::move(source), origin);
}

std::unique_ptr<RecordReader> read_text(std::unique_ptr<ByteSource> source,
                                        const DocumentOrigin& origin) {
  return std::make_unique<TextReader>(std::move(source), origin);
}

}  // namespace sbtrain
