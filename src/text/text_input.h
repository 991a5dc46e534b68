// Documents from files, folders and standard input, of every format that `sbtrain prepare` reads.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "text/byte_source.h"
#include "text/decompress.h"
#include "text/document.h"
#include "text/text_format.h"
#include "text/token_file.h"

namespace sbtrain {

struct InputOptions {
  InputFormat format = InputFormat::kAuto;  // of all files; kAuto: each is recognised
  RecordKeys keys{};
  // Files of tokens: the id between documents. -1: that of llm.c's header; none for nanoGPT.
  int64_t end_of_text = -1;
};

struct TextFile {
  DocumentOrigin origin;  // its name is the path, or "standard input"
  bool standard_input = false;
  InputFormat format = InputFormat::kAuto;
  const LlmCModel* model = nullptr;  // of kLlmC
  int64_t bytes = 0;                 // its size; 0 for standard input
  int64_t rows = 0;                  // of kParquet
};

// Reads files of text (plain or JSON lines), of text in tables (Parquet) and of token ids (llm.c,
// nanoGPT); all but Parquet may be compressed by gzip or Zstandard. A folder stands for all files
// in it and below whose names end in .jsonl, .ndjson, .json, .txt, .text, .md, .rst (each also with
// .gz or .zst), .parquet or .bin, in the order of their names; .json and .bin files are left out if
// they are not JSON lines or have no header of llm.c's. "-" stands for standard input. Memory is
// bounded: long texts are returned in parts, a line or row may have up to kMaxRecordBytes, and
// compressed files are read as streams.
class TextInput {
 public:
  // Throws ExitCode::kUsage for a path that does not exist or is not a regular file or folder, for
  // a second "-", and if there is nothing to read; ExitCode::kData, with the name, for a file that
  // is not what it has to be: binary data, UTF-16 or another encoding, a JSON array, an archive, a
  // damaged start. All files are checked before the first is read.
  explicit TextInput(const std::vector<std::string>& paths, InputOptions options = {});
  ~TextInput() { stop(); }
  TextInput(const TextInput&) = delete;
  TextInput& operator=(const TextInput&) = delete;

  // Returns false at the end of the input. Throws ExitCode::kData for a file that cannot be read,
  // is damaged or cut short, and ReadingStopped after stop(). The file of a document lives as long
  // as this object.
  bool next(RawDocument& document);

  // Ends a next() that waits for input in another thread, and all later ones.
  void stop() { stop_ = true; }

  const std::vector<TextFile>& files() const { return files_; }
  // Paths by which outputs can be compared with the inputs.
  std::vector<std::string> paths() const;
  // The input as a message names it: its first file, and how many others there are.
  std::string name() const;
  // Of all files, compressed as they are; 0 if standard input is among them.
  int64_t total_bytes() const { return total_bytes_; }
  // How much of total_bytes() has been read. To be called by the thread that calls next().
  int64_t position() const;

  // Files of the folders that are read, and those that are left out, by kind: the extension and,
  // where it would have done, the reason ("" for no extension).
  const std::map<std::string, int64_t>& taken() const { return taken_; }
  const std::map<std::string, int64_t>& left_out() const { return left_out_; }

 private:
  void add_folder(const std::string& folder);
  void add_file(const std::string& path);
  void add_standard_input();
  bool add_candidate(const std::string& path);
  void count_rows();
  bool open_next();

  // The content of a file, decompressed. `ahead`: by a thread of its own.
  struct Opened {
    const DescriptorSource* descriptor = nullptr;
    Compression compression = Compression::kNone;
    std::unique_ptr<PeekSource> bytes{};
  };
  Opened open(FileDescriptor fd, const std::string& name, bool ahead) const;
  // Recognises a file, and completes `file`. Returns the problem; empty if it can be read.
  std::string examine(TextFile& file, Opened& opened) const;

  const InputOptions options_;
  std::atomic<bool> stop_ = false;
  std::vector<TextFile> files_;
  std::map<std::string, int64_t> taken_;
  std::map<std::string, int64_t> left_out_;
  int64_t total_bytes_ = 0;
  Opened standard_input_;                         // opened to be examined, and not read yet
  size_t opened_ = 0;                             // files opened so far
  int64_t closed_bytes_ = 0;                      // of the files that have been read
  const DescriptorSource* descriptor_ = nullptr;  // of the open file; null for kParquet
  std::unique_ptr<RecordReader> reader_;          // of the open file
};

}  // namespace sbtrain
