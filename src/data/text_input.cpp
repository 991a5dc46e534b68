#include "data/text_input.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "core/error.h"
#include "core/files.h"
#include "data/text_format.h"

namespace sbtrain {
namespace {

namespace fs = std::filesystem;

constexpr size_t kReadBytes = size_t{1} << 20;

bool is_json_lines(const std::string& path) {
  return path.ends_with(".jsonl");
}

bool is_text(const fs::path& path) {
  static const std::set<std::string> kExtensions = {".jsonl", ".txt", ".text", ".md", ".rst"};
  return kExtensions.contains(path.extension().string());
}

// The length of a part of `text` that may have up to `limit` bytes.
size_t part_end(std::string_view text, size_t limit) {
  if (text.size() <= limit) return text.size();
  const size_t newline = text.substr(0, limit).rfind('\n');
  if (newline != std::string_view::npos) return newline + 1;
  size_t end = limit;
  while (end > limit - 4 && (static_cast<uint8_t>(text[end]) & 0xc0) == 0x80) --end;
  return end;
}

}  // namespace

TextInput::TextInput(const std::vector<std::string>& paths) {
  try {
    for (const std::string& path : paths) {
      if (!fs::exists(path)) fail(ExitCode::kUsage, "{}: no such file or folder", path);
      if (fs::is_directory(path)) {
        add_folder(path);
      } else {
        files_.push_back(path);
      }
    }
    check_files();
  } catch (const fs::filesystem_error& error) {
    fail(ExitCode::kUsage, "cannot read the input: {}", error.what());
  }
  if (files_.empty()) fail(ExitCode::kUsage, "no input files are given");
}

void TextInput::add_folder(const std::string& folder) {
  std::vector<std::string> found;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_directory()) continue;
    if (entry.is_regular_file() && is_text(entry.path())) {
      found.push_back(entry.path().string());
    } else {
      ++left_out_[entry.path().extension().string()];
    }
  }
  if (found.empty()) {
    fail(ExitCode::kUsage, "{}: no .jsonl, .txt, .text, .md or .rst files in this folder", folder);
  }
  std::sort(found.begin(), found.end());
  files_.insert(files_.end(), found.begin(), found.end());
}

// Checks all files before the first is read, so that hours of work are not lost at the last file.
void TextInput::check_files() {
  for (const std::string& file : files_) {
    const FileDescriptor fd = open_input(file, ExitCode::kUsage);
    std::string head(kFormatBytes, '\0');
    const ssize_t got = ::pread(fd.get(), head.data(), head.size(), 0);
    if (got < 0) fail(ExitCode::kData, "{}: cannot read: {}", file, std::strerror(errno));
    head.resize(static_cast<size_t>(got));
    const std::string format = foreign_format(head, file);
    if (!format.empty()) fail(ExitCode::kData, "{}: {}", file, format);
    total_bytes_ += static_cast<int64_t>(fs::file_size(file));
  }
}

bool TextInput::open_next() {
  if (opened_ == files_.size()) return false;
  fd_ = open_input(files_[opened_], ExitCode::kData);
  ++opened_;
  line_ = 0;
  started_ = at_end_ = false;
  buffer_.clear();
  at_ = 0;
  return true;
}

// Reads until `wanted` bytes are in the buffer; returns false if the file ends before.
bool TextInput::fill(size_t wanted) {
  if (at_ > kReadBytes) {
    buffer_.erase(0, at_);
    at_ = 0;
  }
  while (!at_end_ && buffer_.size() - at_ < wanted) {
    const size_t before = buffer_.size();
    buffer_.resize(before + kReadBytes);
    const ssize_t got = ::read(fd_.get(), buffer_.data() + before, kReadBytes);
    buffer_.resize(before + static_cast<size_t>(std::max<ssize_t>(got, 0)));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      fail(ExitCode::kData, "{}: cannot read: {}", files_[opened_ - 1], std::strerror(errno));
    }
    at_end_ = got == 0;
  }
  return buffer_.size() - at_ >= wanted;
}

bool TextInput::next_line(RawDocument& document) {
  size_t end = std::string::npos;
  for (size_t seen = 0; end == std::string::npos; seen = buffer_.size() - at_) {
    if (seen > kMaxLineBytes) {
      fail(ExitCode::kData,
           "{}:{}: a line of more than {} MiB; split the document, or give it as a plain text "
           "file, which may have any length",
           files_[opened_ - 1], line_ + 1, kMaxLineBytes >> 20);
    }
    const bool more = fill(seen + 1);
    end = buffer_.find('\n', at_ + seen);
    if (!more && end == std::string::npos) end = buffer_.size();
  }
  if (end == buffer_.size() && end == at_) return false;
  document.data.assign(buffer_, at_, end - at_);
  at_ = std::min(end + 1, buffer_.size());
  document.line = ++line_;
  document.first = document.last = true;
  return true;
}

bool TextInput::next_part(RawDocument& document) {
  if (started_ && at_end_ && at_ == buffer_.size()) return false;
  fill(kPartBytes + 1);  // one byte more than a part shows whether the part is the last
  const std::string_view text = std::string_view(buffer_).substr(at_);
  const size_t bytes = part_end(text, kPartBytes);
  document.data.assign(text.substr(0, bytes));
  document.line = 0;
  document.first = !started_;
  document.last = bytes == text.size();
  at_ += bytes;
  started_ = true;
  return true;
}

bool TextInput::next(RawDocument& document) {
  while (true) {
    if (fd_.get() < 0 && !open_next()) return false;
    document.file = &files_[opened_ - 1];
    const bool json = is_json_lines(*document.file);
    if (!(json ? next_line(document) : next_part(document))) {
      fd_.reset();
      continue;
    }
    const bool blank = json && document.data.find_first_not_of(" \t\r") == std::string::npos;
    if (!blank) return true;
  }
}

// ---- JSON ----------------------------------------------------------------------------------

namespace {

// Keeps "text" and "source" of the object on a line and drops everything else as it is read, so
// that a line needs no more memory than its longest string, however deep it nests.
class RecordReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  bool null() override { return value(); }
  bool boolean(bool) override { return value(); }
  bool number_integer(int64_t) override { return value(); }
  bool number_unsigned(uint64_t) override { return value(); }
  bool number_float(double, const std::string&) override { return value(); }
  bool binary(nlohmann::json::binary_t&) override { return value(); }
  bool string(std::string& text) override {
    if (depth_ == 1 && key_ == "text") {
      text_ = std::move(text);
      has_text_ = true;
    } else if (depth_ == 1 && key_ == "source") {
      source_ = std::move(text);
    } else if (depth_ == 0) {
      return refuse("it is no object");
    }
    return true;
  }
  bool start_object(size_t) override {
    if (depth_ > 0 && !value()) return false;
    ++depth_;
    return true;
  }
  bool start_array(size_t) override {
    if (!value()) return false;
    ++depth_;
    return true;
  }
  bool key(std::string& name) override {
    if (depth_ == 1) key_ = name;
    return true;
  }
  bool end_object() override { return leave(); }
  bool end_array() override { return leave(); }
  bool parse_error(size_t, const std::string&, const nlohmann::json::exception& error) override {
    // After this marker the message quotes the input, which may have any length.
    const std::string_view what = error.what();
    return refuse(std::string(what.substr(0, std::min<size_t>(what.find("; last read"), 200))));
  }

  // Why the line is refused; empty if it is accepted.
  const std::string& problem() {
    if (problem_.empty() && !has_text_) problem_ = "it has no \"text\"";
    return problem_;
  }
  std::string& text() { return text_; }
  std::string& source() { return source_; }

 private:
  // Handles a value that is not a string.
  bool value() {
    if (depth_ == 0) return refuse("it is no object");
    if (depth_ == 1 && (key_ == "text" || key_ == "source")) {
      return refuse(fmt::format("its \"{}\" is no string", key_));
    }
    return true;
  }
  bool leave() {
    --depth_;
    return true;
  }
  bool refuse(std::string problem) {
    problem_ = std::move(problem);
    return false;
  }

  int64_t depth_ = 0;
  std::string key_;
  std::string text_;
  std::string source_;
  std::string problem_;
  bool has_text_ = false;
};

}  // namespace

Document parse_document(RawDocument raw) {
  Document document{.source = fs::path(*raw.file).stem().string(), .text = {}};
  if (raw.line == 0) {
    document.text = std::move(raw.data);
    return document;
  }
  RecordReader reader;
  nlohmann::json::sax_parse(raw.data, &reader);
  if (!reader.problem().empty()) {
    fail(ExitCode::kData, "{}:{}: not a JSON object with a string \"text\": {}", *raw.file,
         raw.line, reader.problem());
  }
  document.text = std::move(reader.text());
  if (!reader.source().empty()) document.source = std::move(reader.source());
  return document;
}

}  // namespace sbtrain
