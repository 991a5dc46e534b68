#include "text/parquet_file.h"

#include <unistd.h>

#include <array>
#include <charconv>
#include <cstring>

#include "core/error.h"
#include "core/files.h"
#include "core/python.h"
#include "text/byte_source.h"
#include "text/parquet_rows.h"
#include "text/text_reader.h"

namespace sbtrain {
namespace {

constexpr int kMissingLibrary = 3;  // exit codes of parquet_rows.py
constexpr int kBadFile = 4;

// Throws unless the helper has done its work. `purpose` names the file or files.
void check_result(PythonHelper& helper, const std::string& purpose) {
  const PythonHelper::Result result = helper.wait();
  const std::string& python = helper.interpreter();
  if (result.status == 0) return;
  if (result.status == kBadFile) fail(ExitCode::kData, "{}", result.errors);
  if (result.status == kMissingLibrary) {
    fail(ExitCode::kData, "{}: reading Parquet needs pyarrow, which {} does not have ({}). {}",
         purpose, python, result.errors, python_advice("pyarrow"));
  }
  fail(ExitCode::kData, "{}: reading this Parquet file with {} failed with exit code {}: {}",
       purpose, python, result.status, result.errors);
}

// A Parquet file ends with the length of its index and the mark that it starts with.
void check_end(const std::string& file) {
  constexpr int64_t kEndBytes = 8;
  const FileDescriptor fd = open_input(file, ExitCode::kData);
  const int64_t size = ::lseek(fd.get(), 0, SEEK_END);
  std::array<char, kEndBytes> end{};
  uint32_t index_bytes = 0;
  const bool whole =
      size >= 3 * kEndBytes / 2 &&
      ::pread(fd.get(), end.data(), end.size(), size - kEndBytes) == kEndBytes &&
      std::memcmp(end.data() + 4, "PAR1", 4) == 0 &&
      (std::memcpy(&index_bytes, end.data(), sizeof index_bytes), index_bytes <= size - 12);
  if (!whole) {
    fail(ExitCode::kData,
         "{}: a Parquet file that was cut short (its index is missing); fetch or write it again",
         file);
  }
}

std::string read_all(FileDescriptor fd, const std::string& name) {
  const std::atomic<bool> never = false;
  DescriptorSource source(std::move(fd), name, never);
  std::string text;
  std::array<char, 4096> buffer{};
  while (const size_t got = source.read(buffer.data(), buffer.size())) {
    text.append(buffer.data(), got);
  }
  return text;
}

class ParquetReader final : public RecordReader {
 public:
  ParquetReader(const DocumentOrigin& origin, int64_t rows, const std::atomic<bool>& stop)
      : origin_(origin),
        rows_(rows),
        helper_(kParquetRows, {"rows", origin.keys.text, origin.keys.source, origin.name}, "",
                origin.name),
        window_(std::make_unique<DescriptorSource>(helper_.take_output(), origin.name, stop)) {}

  bool next(RawDocument& document) override {
    std::array<int32_t, 2> lengths{};
    if (!window_.fill(sizeof lengths)) {
      check_result(helper_, origin_.name);
      if (row_ != rows_ || !window_.bytes().empty()) {
        fail(ExitCode::kData, "{}: {} of its {} rows could be read", origin_.name, row_, rows_);
      }
      return false;
    }
    std::memcpy(lengths.data(), window_.bytes().data(), sizeof lengths);
    const auto text = static_cast<size_t>(lengths[0]);
    const size_t source = lengths[1] < 0 ? 0 : static_cast<size_t>(lengths[1]);
    if (text > kMaxRecordBytes || !window_.fill(sizeof lengths + text + source)) {
      check_result(helper_, origin_.name);
      fail(ExitCode::kData, "{}: row {} could not be read", origin_.name, row_ + 1);
    }
    window_.consume(sizeof lengths);
    document = {.kind = RawDocument::Kind::kRow,
                .data = std::string(window_.bytes().substr(0, text)),
                .source = std::string(window_.bytes().substr(text, source)),
                .origin = &origin_,
                .position = ++row_};
    window_.consume(text + source);
    return true;
  }

  double progress() const override {
    return rows_ > 0 ? static_cast<double>(row_) / static_cast<double>(rows_) : 1;
  }

 private:
  const DocumentOrigin& origin_;
  const int64_t rows_;
  int64_t row_ = 0;  // rows returned so far
  PythonHelper helper_;
  ByteWindow window_;
};

}  // namespace

std::vector<int64_t> count_parquet_rows(const std::vector<std::string>& files,
                                        const RecordKeys& keys) {
  std::string names;
  for (const std::string& file : files) {
    check_end(file);
    names += file + '\0';
  }
  PythonHelper helper(kParquetRows, {"check", keys.text, keys.source}, names, files.front());
  const std::string counts = read_all(helper.take_output(), files.front());
  check_result(helper, files.front());
  std::vector<int64_t> rows;
  for (const char* at = counts.data(); at != counts.data() + counts.size(); ++at) {
    at = std::from_chars(at, counts.data() + counts.size(), rows.emplace_back(0)).ptr;
    if (*at != '\n') break;
  }
  if (rows.size() != files.size()) {
    fail(ExitCode::kData,
         "{}: {} does not answer as Python does: it counted the rows of {} Parquet files, not of "
         "{}; "
         "SBTRAIN_PYTHON names the interpreter",
         files.front(), helper.interpreter(), rows.size(), files.size());
  }
  return rows;
}

std::unique_ptr<RecordReader> read_parquet(const DocumentOrigin& origin, int64_t rows,
                                           const std::atomic<bool>& stop) {
  return std::make_unique<ParquetReader>(origin, rows, stop);
}

}  // namespace sbtrain
