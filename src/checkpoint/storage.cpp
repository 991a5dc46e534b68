#include "checkpoint/storage.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <system_error>
#include <vector>

#include "core/error.h"

namespace sbtrain {
namespace fs = std::filesystem;
namespace {

// One system call moves at most this much.
constexpr size_t kMaxWrite = size_t{64} << 20;
// Small enough that the hash finds in cache what was read.
constexpr size_t kHashed = size_t{1} << 20;

[[noreturn]] void fail_storage(std::string_view operation, const fs::path& path, int error) {
  fail(ExitCode::kStorage, "cannot {} {}: {}", operation, path.string(),
       std::generic_category().message(error));
}

// Data, and what of the metadata is needed to find it. close() is not retried: Linux frees the
// descriptor even when it reports an error.
void sync_and_close(FileDescriptor& fd, const fs::path& path) {
  int result = 0;
  do {
    result = ::fdatasync(fd.get());
  } while (result != 0 && errno == EINTR);
  if (result != 0) fail_storage("flush", path, errno);
  if (::close(fd.release()) != 0 && errno != EINTR) fail_storage("close", path, errno);
}

}  // namespace

OutputFile::OutputFile(Storage storage, fs::path path)
    : storage_(std::move(storage)), path_(std::move(path)) {
  storage_.before("create", path_);
  fd_ = FileDescriptor(::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  if (fd_.get() < 0) fail_storage("create", path_, errno);
}

void OutputFile::reserve(uint64_t bytes) {
  if (bytes == 0) return;
  storage_.before("reserve", path_);
  int result = 0;
  do {
    result = ::fallocate(fd_.get(), 0, 0, static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  const bool unsupported = errno == EOPNOTSUPP || errno == ENOSYS || errno == EINVAL;
  if (result != 0 && !unsupported) fail_storage("write", path_, errno);
}

void OutputFile::write_at(uint64_t offset, const void* data, size_t bytes) const {
  const char* at = static_cast<const char*>(data);
  const uint64_t begin = offset;
  while (bytes > 0) {
    storage_.before("write", path_);
    const ssize_t written =
        ::pwrite(fd_.get(), at, std::min(bytes, kMaxWrite), static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) fail_storage("write", path_, written == 0 ? ENOSPC : errno);
    at += written;
    offset += static_cast<uint64_t>(written);
    bytes -= static_cast<size_t>(written);
  }
  // A hint: finish() reports what fails on the way to the disk.
  ::sync_file_range(fd_.get(), static_cast<off_t>(begin), static_cast<off_t>(offset - begin),
                    SYNC_FILE_RANGE_WRITE);
}

void OutputFile::finish() {
  storage_.before("flush", path_);
  sync_and_close(fd_, path_);
}

int Storage::injected(std::string_view operation, const fs::path& path) const {
  if (!hook_) return 0;
  const std::lock_guard lock(*hook_mutex_);
  return hook_(operation, path);
}

void Storage::before(std::string_view operation, const fs::path& path) const {
  if (const int error = injected(operation, path)) fail_storage(operation, path, error);
}

OutputFile Storage::create(const fs::path& path) const {
  return {*this, path};
}

void Storage::make_folders(const fs::path& path) const {
  before("create folder", path);
  sbtrain::make_folders(path);
}

void Storage::make_folder(const fs::path& path) const {
  before("create folder", path);
  sbtrain::make_folder(path);
}

void Storage::sync_folder(const fs::path& path) const {
  before("flush folder", path);
  sbtrain::sync_folder(path);
}

void Storage::rename(const fs::path& from, const fs::path& to) const {
  before("rename", from);
  if (::rename(from.c_str(), to.c_str()) != 0) {
    fail(ExitCode::kStorage, "cannot rename {} to {}: {}", from.string(), to.string(),
         std::generic_category().message(errno));
  }
}

bool Storage::exchange(const fs::path& a, const fs::path& b) const {
  int error = injected("exchange", a);
  if (error == 0) {
    const int result = ::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE);
    if (result == 0) return true;
    error = errno;
  }
  if (error == EINVAL || error == ENOSYS || error == ENOTSUP) return false;
  fail_storage("replace", b, error);
}

void Storage::remove_tree(const fs::path& path) const {
  before("remove", path);
  std::error_code error;
  fs::remove_all(path, error);
  if (error) fail_storage("remove", path, error.value());
}

void Storage::replace_file(const fs::path& path, std::string_view content) const {
  sbtrain::replace_file(path, content, hook_, MissingFolders::kError);
}

InputFile::InputFile(fs::path path)
    : path_(std::move(path)), fd_(open_input(path_, ExitCode::kNoCheckpoint)) {
  struct stat status {};
  if (::fstat(fd_.get(), &status) != 0) {
    fail(ExitCode::kNoCheckpoint, "{}: cannot examine: {}", path_.string(),
         std::generic_category().message(errno));
  }
  size_ = static_cast<uint64_t>(status.st_size);
}

void InputFile::read(uint64_t offset, void* out, uint64_t bytes) const {
  char* at = static_cast<char*>(out);
  while (bytes > 0) {
    const ssize_t got = ::pread(fd_.get(), at, std::min<uint64_t>(bytes, size_t{1} << 30),
                                static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      fail(ExitCode::kNoCheckpoint, "{}: cannot read at byte {}: {}", path_.string(), offset,
           std::generic_category().message(errno));
    }
    if (got == 0) {
      fail(ExitCode::kNoCheckpoint, "{}: the file ends at byte {}, {} more bytes were expected",
           path_.string(), offset, bytes);
    }
    at += got;
    offset += static_cast<uint64_t>(got);
    bytes -= static_cast<uint64_t>(got);
  }
}

std::string InputFile::sha256(uint64_t offset, uint64_t bytes) const {
  Sha256 hash;
  std::vector<char> chunk(std::min<uint64_t>(bytes, kHashed));
  while (bytes > 0) {
    const uint64_t part = std::min<uint64_t>(bytes, chunk.size());
    read(offset, chunk.data(), part);
    hash.update(chunk.data(), part);
    offset += part;
    bytes -= part;
  }
  return hash.hex();
}

}  // namespace sbtrain
