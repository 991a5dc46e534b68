// A library that is loaded in front of a program (LD_PRELOAD) and writes down what the program does
// to the files below a folder: see file_history.h, which reads that.
#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdarg>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>

#include "file_history.h"

namespace {

namespace fs = std::filesystem;
using sbtrain::test::FileOperation;
using sbtrain::test::OperationHead;

// One operation at a time, so that the order of the records is that of what happened.
pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

class Turn {
 public:
  Turn() { pthread_mutex_lock(&mutex); }
  ~Turn() { pthread_mutex_unlock(&mutex); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
};

std::string of_environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// What a record is of, before and after which errno is the caller's.
void record(FileOperation operation, uint64_t inode, uint64_t number, std::string_view first = "",
            std::string_view second = "") {
  const int saved = errno;
  static const int fd = static_cast<int>(
      syscall(SYS_openat, AT_FDCWD, of_environment(sbtrain::test::kHistoryVariable).c_str(),
              O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  const OperationHead head{.operation = operation,
                           .inode = inode,
                           .number = number,
                           .first = first.size(),
                           .second = second.size()};
  std::string bytes(reinterpret_cast<const char*>(&head), sizeof(head));
  bytes.append(first).append(second);
  if (syscall(SYS_write, fd, bytes.data(), bytes.size()) != static_cast<long>(bytes.size())) {
    std::abort();
  }
  errno = saved;
}

std::string link_of(const std::string& link) {
  char target[PATH_MAX];
  const long length = syscall(SYS_readlinkat, AT_FDCWD, link.c_str(), target, sizeof(target));
  return length > 0 ? std::string(target, static_cast<size_t>(length)) : "";
}

// The absolute path if it lies in the recorded folder; nothing otherwise.
std::string recorded(int folder, const char* path) {
  static const std::string root = of_environment(sbtrain::test::kRootVariable) + "/";
  std::string whole = path;
  if (!whole.starts_with('/')) {
    const std::string from = folder == AT_FDCWD
                                 ? link_of("/proc/self/cwd")
                                 : link_of("/proc/self/fd/" + std::to_string(folder));
    whole = from + "/" + whole;
  }
  whole = fs::path(whole).lexically_normal().string();
  if (whole.ends_with('/')) whole.pop_back();
  return whole.starts_with(root) ? whole.substr(root.size()) : "";
}

bool is_recorded(int fd) {
  return !recorded(AT_FDCWD, link_of("/proc/self/fd/" + std::to_string(fd)).c_str()).empty();
}

struct stat status_of(int fd) {
  struct stat status {};
  syscall(SYS_fstat, fd, &status);
  return status;
}

bool there(int folder, const char* path, struct stat& status) {
  return syscall(SYS_newfstatat, folder, path, &status, 0) == 0;
}

int open_file(int folder, const char* path, int flags, mode_t mode) {
  const Turn turn;
  const bool writes = (flags & (O_CREAT | O_TRUNC)) != 0 && (flags & O_TMPFILE) != O_TMPFILE;
  const std::string name = writes ? recorded(folder, path) : "";
  struct stat before {};
  const bool existed = !name.empty() && there(folder, path, before);
  const long fd = syscall(SYS_openat, folder, path, flags, mode);
  if (fd < 0 || name.empty()) return static_cast<int>(fd);
  const uint64_t inode = status_of(static_cast<int>(fd)).st_ino;
  if (!existed) record(FileOperation::kCreate, inode, 0, name);
  if (existed && (flags & O_TRUNC) != 0) record(FileOperation::kResize, inode, 0);
  return static_cast<int>(fd);
}

ssize_t write_file(int fd, const void* data, size_t bytes, off_t offset, bool at_offset) {
  const Turn turn;
  const bool wanted = is_recorded(fd);
  if (wanted && !at_offset) {
    const bool appends = (syscall(SYS_fcntl, fd, F_GETFL) & O_APPEND) != 0;
    offset = appends ? status_of(fd).st_size : syscall(SYS_lseek, fd, 0, SEEK_CUR);
  }
  const long done = at_offset ? syscall(SYS_pwrite64, fd, data, bytes, offset)
                              : syscall(SYS_write, fd, data, bytes);
  if (wanted && done > 0) {
    record(FileOperation::kWrite, status_of(fd).st_ino, static_cast<uint64_t>(offset),
           {static_cast<const char*>(data), static_cast<size_t>(done)});
  }
  return done;
}

int flush_file(int fd, long call) {
  const Turn turn;
  const long result = syscall(call, fd);
  // The recorded folder itself has no name within it.
  const std::string path = link_of("/proc/self/fd/" + std::to_string(fd));
  const bool wanted = is_recorded(fd) || path == of_environment(sbtrain::test::kRootVariable);
  if (result == 0 && wanted) record(FileOperation::kFlush, status_of(fd).st_ino, 0);
  return static_cast<int>(result);
}

int move_file(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) {
  const Turn turn;
  const std::string old_name = recorded(from_folder, from);
  const std::string new_name = recorded(to_folder, to);
  const long result = syscall(SYS_renameat2, from_folder, from, to_folder, to, flags);
  if (result == 0 && !old_name.empty() && !new_name.empty()) {
    const bool exchanges = (flags & RENAME_EXCHANGE) != 0;
    record(exchanges ? FileOperation::kExchange : FileOperation::kRename, 0, 0, old_name, new_name);
  }
  return static_cast<int>(result);
}

int make_folder(int folder, const char* path, mode_t mode) {
  const Turn turn;
  const std::string name = recorded(folder, path);
  const long result = syscall(SYS_mkdirat, folder, path, mode);
  struct stat status {};
  if (result == 0 && !name.empty() && there(folder, path, status)) {
    record(FileOperation::kMakeFolder, status.st_ino, 0, name);
  }
  return static_cast<int>(result);
}

int remove_file(int folder, const char* path, int flags) {
  const Turn turn;
  const std::string name = recorded(folder, path);
  const long result = syscall(SYS_unlinkat, folder, path, flags);
  if (result == 0 && !name.empty()) record(FileOperation::kRemove, 0, 0, name);
  return static_cast<int>(result);
}

int resize_file(int fd, off_t size) {
  const Turn turn;
  const long result = syscall(SYS_ftruncate, fd, size);
  if (result == 0 && is_recorded(fd)) {
    record(FileOperation::kResize, status_of(fd).st_ino, static_cast<uint64_t>(size));
  }
  return static_cast<int>(result);
}

int reserve_space(int fd, int mode, off_t offset, off_t length) {
  const Turn turn;
  const long result = syscall(SYS_fallocate, fd, mode, offset, length);
  if (result == 0 && is_recorded(fd)) {
    record(FileOperation::kResize, status_of(fd).st_ino,
           static_cast<uint64_t>(status_of(fd).st_size));
  }
  return static_cast<int>(result);
}

}  // namespace

// What the program and the libraries that it uses call.
extern "C" {

int open(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = va_arg(rest, mode_t);
  va_end(rest);
  return open_file(AT_FDCWD, path, flags, mode);
}
int open64(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = va_arg(rest, mode_t);
  va_end(rest);
  return open_file(AT_FDCWD, path, flags, mode);
}
int openat(int folder, const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = va_arg(rest, mode_t);
  va_end(rest);
  return open_file(folder, path, flags, mode);
}
int openat64(int folder, const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = va_arg(rest, mode_t);
  va_end(rest);
  return open_file(folder, path, flags, mode);
}
ssize_t write(int fd, const void* data, size_t bytes) {
  return write_file(fd, data, bytes, 0, false);
}
ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) {
  return write_file(fd, data, bytes, offset, true);
}
ssize_t pwrite64(int fd, const void* data, size_t bytes, off64_t offset) {
  return write_file(fd, data, bytes, offset, true);
}
int fsync(int fd) {
  return flush_file(fd, SYS_fsync);
}
int fdatasync(int fd) {
  return flush_file(fd, SYS_fdatasync);
}
int rename(const char* from, const char* to) noexcept {
  return move_file(AT_FDCWD, from, AT_FDCWD, to, 0);
}
int renameat2(int from_folder, const char* from, int to_folder, const char* to,
              unsigned flags) noexcept {
  return move_file(from_folder, from, to_folder, to, flags);
}
int mkdir(const char* path, mode_t mode) noexcept {
  return make_folder(AT_FDCWD, path, mode);
}
int unlink(const char* path) noexcept {
  return remove_file(AT_FDCWD, path, 0);
}
int rmdir(const char* path) noexcept {
  return remove_file(AT_FDCWD, path, AT_REMOVEDIR);
}
int unlinkat(int folder, const char* path, int flags) noexcept {
  return remove_file(folder, path, flags);
}
int remove(const char* path) noexcept {
  struct stat status {};
  if (syscall(SYS_newfstatat, AT_FDCWD, path, &status, AT_SYMLINK_NOFOLLOW) != 0) return -1;
  return remove_file(AT_FDCWD, path, S_ISDIR(status.st_mode) ? AT_REMOVEDIR : 0);
}
int ftruncate(int fd, off_t size) noexcept {
  return resize_file(fd, size);
}
int ftruncate64(int fd, off64_t size) noexcept {
  return resize_file(fd, size);
}
int fallocate(int fd, int mode, off_t offset, off_t length) {
  return reserve_space(fd, mode, offset, length);
}
int fallocate64(int fd, int mode, off64_t offset, off64_t length) {
  return reserve_space(fd, mode, offset, length);
}

}  // extern "C"
