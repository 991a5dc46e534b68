#include "data/atomic_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "core/error.h"

namespace sbtrain {
namespace {

[[noreturn]] void fail_io(const char* operation, const std::string& path) {
  fail(ExitCode::kStorage, "{}: cannot {}: {}", path, operation, std::strerror(errno));
}

std::string parent_of(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

}  // namespace

void make_parent_folders(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(parent_of(path), error);
  if (error) {
    fail(ExitCode::kStorage, "{}: cannot create the folder: {}", parent_of(path), error.message());
  }
}

void sync_parent_folder(const std::string& path) {
  const FileDescriptor folder(::open(parent_of(path).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // Some file systems cannot sync folders (EINVAL); nothing more can be done there.
  if (folder.get() < 0 || (::fsync(folder.get()) != 0 && errno != EINVAL)) {
    fail_io("sync the folder of", path);
  }
}

void publish(const std::string& temporary, const std::string& path) {
  if (std::rename(temporary.c_str(), path.c_str()) != 0)
    fail_io("rename the finished file to", path);
  sync_parent_folder(path);
}

AtomicFile::AtomicFile(std::string path) : path_(std::move(path)), temporary_(path_ + ".tmp") {
  make_parent_folders(path_);
  fd_ = FileDescriptor(::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (fd_.get() < 0) fail_io("create", temporary_);
}

AtomicFile::~AtomicFile() {
  if (!committed_) ::unlink(temporary_.c_str());
}

void AtomicFile::write(const void* data, size_t bytes) {
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(fd_.get(), from, bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail_io("write", temporary_);
    from += written;
    bytes -= static_cast<size_t>(written);
  }
}

void AtomicFile::commit() {
  if (::fsync(fd_.get()) != 0) fail_io("sync", temporary_);
  fd_.reset();
  publish(temporary_, path_);
  committed_ = true;
}

}  // namespace sbtrain
