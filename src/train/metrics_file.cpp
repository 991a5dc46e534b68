#include "train/metrics_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/error.h"
#include "core/files.h"

namespace sbtrain {

AppendFile::AppendFile(const std::string& path, Mode mode) : path_(path) {
  const int exclusive = mode == Mode::kCreate ? O_EXCL : 0;
  fd_ = ::open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | exclusive, 0644);
  if (fd_ < 0) fail(ExitCode::kStorage, "{}: cannot open: {}", path, std::strerror(errno));
  sync_entry(path);
}

AppendFile::~AppendFile() {
  ::close(fd_);
}

void AppendFile::append(std::string_view record) {
  struct stat before {};
  const bool known = ::fstat(fd_, &before) == 0;
  while (!record.empty()) {
    const ssize_t n = ::write(fd_, record.data(), record.size());
    if (n >= 0) {
      record.remove_prefix(static_cast<size_t>(n));
    } else if (errno != EINTR) {
      const int error = errno;
      // An incomplete record would run into the next one and spoil it.
      const bool restored = known && ::ftruncate(fd_, before.st_size) == 0;
      fail(ExitCode::kStorage, "{}: cannot write: {}{}", path_, std::strerror(error),
           restored ? "" : " (the last record may be incomplete)");
    }
  }
}

void AppendFile::sync() const {
  int result = 0;
  do {
    result = ::fdatasync(fd_);
  } while (result != 0 && errno == EINTR);
  // Devices and pipes have nothing to flush.
  if (result != 0 && errno != EINVAL && errno != EROFS) {
    fail(ExitCode::kStorage, "{}: cannot flush: {}", path_, std::strerror(errno));
  }
}

}  // namespace sbtrain
