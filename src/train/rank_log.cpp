#include "train/rank_log.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <system_error>

#include "core/file_descriptor.h"
#include "core/files.h"
#include "core/log.h"

namespace sbtrain {
namespace {

class FileSink : public LogSink {
 public:
  explicit FileSink(FileDescriptor file) : file_(std::move(file)) {}
  void write(const LogLine& line) override {
    [[maybe_unused]] const ssize_t n = ::write(file_.get(), line.text.data(), line.text.size());
  }

 private:
  FileDescriptor file_;
};

}  // namespace

std::filesystem::path rank_log_path(const std::filesystem::path& run, int rank) {
  return run / "logs" / fmt::format("rank-{:05}.log", rank);
}

void open_rank_log(const std::filesystem::path& run, int rank) {
  const std::filesystem::path path = rank_log_path(run, rank);
  make_folders(path.parent_path());
  FileDescriptor file(
      ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK, 0644));
  if (file.get() < 0) {
    log_warning("cannot write {}: {}", path.string(), std::generic_category().message(errno));
    return;
  }
  add_log_sink(std::make_shared<FileSink>(std::move(file)));
}

}  // namespace sbtrain
