// Documents of text from files: JSON lines or plain text.
#pragma once

#include <cstdint>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

namespace sbtrain {

struct Document {
  std::string source;  // where it is from: the record's "source", else the file's name
  std::string text;
};

// A document as it lies in its file, not parsed yet.
struct RawDocument {
  std::string data;
  const std::string* file = nullptr;  // lives as long as the TextInput
  int64_t line = 0;                   // of a JSON lines file, from 1; 0: a plain text file
};

// Reads .jsonl files (an object with a string "text", and perhaps "source", on each line) and
// plain text files (one document each). A folder stands for all .jsonl, .txt, .text, .md and .rst
// files in it and below, in the order of their names.
class TextInput {
 public:
  // Throws ExitCode::kUsage for a path that does not exist and where there is nothing to read.
  explicit TextInput(const std::vector<std::string>& paths);

  // False at the end. Throws ExitCode::kData for a file that cannot be read.
  bool next(RawDocument& document);

  const std::vector<std::string>& files() const { return files_; }
  int64_t total_bytes() const { return total_bytes_; }  // of all files

 private:
  bool open_next();
  std::vector<std::string> files_;
  int64_t total_bytes_ = 0;
  size_t opened_ = 0;  // files opened so far
  int64_t line_ = 0;
  std::ifstream stream_;
  std::vector<char> buffer_;
};

// Throws ExitCode::kData with file and line for a line that is no such object. Thread-safe.
Document parse_document(RawDocument raw);

}  // namespace sbtrain
