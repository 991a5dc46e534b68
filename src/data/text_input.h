// Documents of text from files: JSON lines or plain text.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/file_descriptor.h"

namespace sbtrain {

struct Document {
  std::string source;  // the record's "source", else the file's name
  std::string text;
};

// A document, or a part of one, as it stands in its file, not parsed yet.
struct RawDocument {
  std::string data;
  const std::string* file = nullptr;  // lives as long as the TextInput
  int64_t line = 0;                   // of a JSON lines file, from 1; 0: a plain text file
  bool first = true;                  // a document starts here
  bool last = true;                   // the document ends here
};

// Reads .jsonl files (an object with a string "text", and perhaps "source", on each line) and
// plain text files (one document each). A folder stands for all .jsonl, .txt, .text, .md and .rst
// files in it and below, in the order of their names. Memory is bounded: a plain text file of any
// length is returned in parts, and a line may have up to kMaxLineBytes.
class TextInput {
 public:
  static constexpr size_t kMaxLineBytes = size_t{64} << 20;
  static constexpr size_t kPartBytes = size_t{256} << 10;

  // Throws ExitCode::kUsage for a path that does not exist or is not a regular file or folder, and
  // if there is nothing to read; ExitCode::kData, with the name, for a file that is not UTF-8
  // text: compressed, Parquet, UTF-16 or other binary data, or a JSON array.
  explicit TextInput(const std::vector<std::string>& paths);

  // Returns false at the end of the input. A part of a plain text file ends after a newline if it
  // has one, and never inside a UTF-8 character. Throws ExitCode::kData for a file that cannot be
  // read and for a line that is too long.
  bool next(RawDocument& document);

  const std::vector<std::string>& files() const { return files_; }
  int64_t total_bytes() const { return total_bytes_; }  // of all files
  // The number of files in the folders that are left out, by extension ("" for none).
  const std::map<std::string, int64_t>& left_out() const { return left_out_; }

 private:
  void add_folder(const std::string& folder);
  void check_files();
  bool open_next();
  bool fill(size_t wanted);
  bool next_line(RawDocument& document);
  bool next_part(RawDocument& document);
  std::vector<std::string> files_;
  std::map<std::string, int64_t> left_out_;
  int64_t total_bytes_ = 0;
  size_t opened_ = 0;  // files opened so far
  int64_t line_ = 0;
  bool started_ = false;  // a part of the open plain text file has been returned
  FileDescriptor fd_;
  std::string buffer_;  // from at_ on: read from the file but not returned yet
  size_t at_ = 0;
  bool at_end_ = false;  // of the open file
};

// Throws ExitCode::kData with file and line for a line that is not such an object. Thread-safe.
Document parse_document(RawDocument raw);

}  // namespace sbtrain
