#include "text/text_input.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <utility>

#include "core/error.h"
#include "core/files.h"
#include "text/parquet_file.h"
#include "text/text_reader.h"

namespace sbtrain {
namespace {

namespace fs = std::filesystem;

constexpr const char* kStandardInput = "standard input";

// The last extension, with that of what is compressed before it: ".jsonl.gz".
std::string extension_of(const fs::path& path) {
  const std::string name = path.filename().string();
  const std::string inner(uncompressed_name(name));
  return fs::path(inner).extension().string() + name.substr(inner.size());
}

std::string source_of(const std::string& path) {
  return fs::path(uncompressed_name(path)).stem().string();
}

// Whether files with this name are read where they lie in a folder.
bool suits(InputFormat named, InputFormat wanted) {
  if (named == InputFormat::kAuto) return false;
  if (wanted == InputFormat::kNanoGpt) return named == InputFormat::kLlmC;  // both are .bin
  return wanted == InputFormat::kAuto || wanted == named;
}

}  // namespace

TextInput::TextInput(const std::vector<std::string>& paths, InputOptions options)
    : options_(std::move(options)) {
  try {
    for (const std::string& path : paths) {
      if (path == "-") {
        add_standard_input();
      } else if (!fs::exists(path)) {
        fail(ExitCode::kUsage, "{}: no such file or folder", path);
      } else if (fs::is_directory(path)) {
        add_folder(path);
      } else {
        add_file(path);
      }
    }
    if (files_.empty()) fail(ExitCode::kUsage, "no input files are given");
    count_rows();
  } catch (const fs::filesystem_error& error) {
    fail(ExitCode::kUsage, "cannot read the input: {}", error.what());
  }
  bool known = true;
  for (const TextFile& file : files_) {
    total_bytes_ += file.bytes;
    known = known && !file.standard_input;
  }
  if (!known) total_bytes_ = 0;
}

void TextInput::add_folder(const std::string& folder) {
  std::vector<std::string> found;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_directory()) continue;
    const InputFormat named = format_of_name(uncompressed_name(entry.path().string()));
    if (entry.is_regular_file() && suits(named, options_.format)) {
      found.push_back(entry.path().string());
    } else {
      ++left_out_[extension_of(entry.path())];
    }
  }
  std::sort(found.begin(), found.end());
  const size_t before = files_.size();
  for (const std::string& path : found) {
    if (add_candidate(path)) ++taken_[extension_of(path)];
  }
  if (files_.size() == before) {
    fail(ExitCode::kUsage,
         "{}: this folder has no {} files; .jsonl, .ndjson, .json, .txt, .text, .md and .rst, each "
         "also with .gz or .zst, .parquet and .bin are looked for",
         folder, options_.format == InputFormat::kAuto ? "such" : name_of(options_.format));
  }
}

// Adds a file of a folder, unless its name has other uses and its content is for one of those.
bool TextInput::add_candidate(const std::string& path) {
  const std::string_view name = uncompressed_name(path);
  const bool ambiguous =
      options_.format == InputFormat::kAuto && (name.ends_with(".json") || name.ends_with(".bin"));
  if (ambiguous) {
    TextFile file{.origin = {.name = path, .source = "", .keys = {}}};
    Opened opened = open(open_input(path, ExitCode::kUsage), path, false);
    if (!examine(file, opened).empty()) {
      const char* reason = name.ends_with(".bin") ? "without llm.c's header" : "not JSON lines";
      ++left_out_[fmt::format("{} ({})", extension_of(path), reason)];
      return false;
    }
  }
  add_file(path);
  return true;
}

void TextInput::add_file(const std::string& path) {
  TextFile file{.origin = {.name = path, .source = source_of(path), .keys = options_.keys},
                .bytes = 0};
  FileDescriptor fd = open_input(path, ExitCode::kUsage);
  file.bytes = ::lseek(fd.get(), 0, SEEK_END);
  ::lseek(fd.get(), 0, SEEK_SET);
  Opened opened = open(std::move(fd), path, false);
  const std::string problem = examine(file, opened);
  if (!problem.empty()) fail(ExitCode::kData, "{}: {}", path, problem);
  files_.push_back(std::move(file));
}

void TextInput::add_standard_input() {
  if (standard_input_.bytes) fail(ExitCode::kUsage, "--input -: standard input is given twice");
  FileDescriptor fd(::fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 3));
  if (fd.get() < 0) {
    fail(ExitCode::kUsage, "cannot read standard input: {}", std::strerror(errno));
  }
  TextFile file{.origin = {.name = kStandardInput, .source = "stdin", .keys = options_.keys},
                .standard_input = true};
  standard_input_ = open(std::move(fd), kStandardInput, true);
  std::string problem = examine(file, standard_input_);
  if (file.format == InputFormat::kParquet) {
    problem = "a Parquet file, whose index is at its end: save it and give its name";
  }
  if (!problem.empty()) fail(ExitCode::kData, "{}: {}", kStandardInput, problem);
  files_.push_back(std::move(file));
}

// Parquet's rows are counted for all files at once: each start of Python takes a second.
void TextInput::count_rows() {
  std::vector<std::string> names;
  for (const TextFile& file : files_) {
    if (file.format == InputFormat::kParquet) names.push_back(file.origin.name);
  }
  if (names.empty()) return;
  const std::vector<int64_t> rows = count_parquet_rows(names, options_.keys);
  auto next = rows.begin();
  for (TextFile& file : files_) {
    if (file.format == InputFormat::kParquet) file.rows = *next++;
  }
}

TextInput::Opened TextInput::open(FileDescriptor fd, const std::string& name, bool ahead) const {
  auto descriptor = std::make_unique<DescriptorSource>(std::move(fd), name, stop_);
  Opened opened{.descriptor = descriptor.get()};
  auto raw = std::make_unique<PeekSource>(std::move(descriptor));
  opened.compression = compression_of(raw->peek(4));
  auto bytes = decompress(opened.compression, std::move(raw), name);
  if (ahead && opened.compression != Compression::kNone) bytes = read_ahead(std::move(bytes));
  opened.bytes = std::make_unique<PeekSource>(std::move(bytes));
  return opened;
}

std::string TextInput::examine(TextFile& file, Opened& opened) const {
  const std::string_view head = opened.bytes->peek(kFormatBytes);
  const std::string_view path = file.standard_input ? std::string_view() : file.origin.name;
  const std::string_view name = uncompressed_name(path);
  if (name != path && opened.compression == Compression::kNone) {
    return "neither gzip nor zstd, though its name says so; fetch it again, or rename it";
  }
  Recognised recognised = recognise(head, name, options_.format);
  file.format = recognised.format;
  file.model = file.format == InputFormat::kLlmC ? llmc_model(head) : nullptr;
  if (file.format == InputFormat::kParquet && opened.compression != Compression::kNone) {
    return "a compressed Parquet file: decompress it first (Parquet compresses by itself)";
  }
  return std::move(recognised.problem);
}

bool TextInput::open_next() {
  if (opened_ == files_.size()) return false;
  const TextFile& file = files_[opened_++];
  descriptor_ = nullptr;
  if (file.format == InputFormat::kParquet) {
    reader_ = read_parquet(file.origin, file.rows, stop_);
    return true;
  }
  Opened opened = file.standard_input
                      ? std::exchange(standard_input_, {})
                      : open(open_input(file.origin.name, ExitCode::kData), file.origin.name, true);
  descriptor_ = opened.descriptor;
  std::unique_ptr<ByteSource> bytes = std::move(opened.bytes);
  if (file.format == InputFormat::kJsonLines) {
    reader_ = read_lines(std::move(bytes), file.origin);
  } else if (file.format == InputFormat::kText) {
    reader_ = read_text(std::move(bytes), file.origin);
  } else {
    const int64_t end_of_text =
        options_.end_of_text < 0 && file.model ? file.model->end_of_text : options_.end_of_text;
    reader_ = read_tokens(std::move(bytes), file.origin, file.model, end_of_text);
  }
  return true;
}

bool TextInput::next(RawDocument& document) {
  while (true) {
    if (!reader_ && !open_next()) return false;
    if (reader_->next(document)) return true;
    closed_bytes_ += files_[opened_ - 1].bytes;
    descriptor_ = nullptr;
    reader_.reset();
  }
}

int64_t TextInput::position() const {
  if (total_bytes_ == 0) return 0;
  if (!reader_) return closed_bytes_;
  if (descriptor_) return closed_bytes_ + descriptor_->position();
  const auto bytes = static_cast<double>(files_[opened_ - 1].bytes);
  return closed_bytes_ + static_cast<int64_t>(bytes * reader_->progress());
}

std::vector<std::string> TextInput::paths() const {
  std::vector<std::string> paths;
  for (const TextFile& file : files_) {
    paths.push_back(file.standard_input ? "/dev/stdin" : file.origin.name);
  }
  return paths;
}

std::string TextInput::name() const {
  const std::string& first = files_.front().origin.name;
  const size_t others = files_.size() - 1;
  if (others == 0) return first;
  return fmt::format("{} and {} other{}", first, others, others == 1 ? "" : "s");
}

}  // namespace sbtrain
