#include "train/rank_log.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <mutex>
#include <system_error>

#include "core/file_descriptor.h"
#include "core/files.h"

namespace sbtrain {
namespace {

class FileSink : public spdlog::sinks::base_sink<std::mutex> {
 public:
  explicit FileSink(FileDescriptor file) : file_(std::move(file)) {}

 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    [[maybe_unused]] const ssize_t n = ::write(file_.get(), line.data(), line.size());
  }
  void flush_() override {}

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
    spdlog::warn("cannot write {}: {}", path.string(), std::generic_category().message(errno));
    return;
  }
  auto& sinks = spdlog::default_logger()->sinks();
  if (rank > 0) {
    for (const auto& sink : sinks) sink->set_level(spdlog::level::err);
  }
  sinks.push_back(std::make_shared<FileSink>(std::move(file)));
}

}  // namespace sbtrain
