#include "core/files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <system_error>
#include <utility>
#include <vector>

namespace sbtrain {
namespace fs = std::filesystem;
namespace {

std::string reason(int error) {
  return std::generic_category().message(error);
}

[[noreturn]] void fail_storage(std::string_view operation, const fs::path& path, int error) {
  fail(ExitCode::kStorage, "{}: cannot {}: {}", path.string(), operation, reason(error));
}

const char* kind(mode_t mode) {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISFIFO(mode)) return "a FIFO or pipe";
  if (S_ISCHR(mode) || S_ISBLK(mode)) return "a device";
  if (S_ISSOCK(mode)) return "a socket";
  return "of an unknown kind";
}

fs::path folder_of(const fs::path& path) {
  const fs::path folder = path.parent_path();
  return folder.empty() ? "." : folder;
}

fs::path with_suffix(fs::path path, std::string_view suffix) {
  return path += suffix;
}

// The file at the end of a chain of symbolic links: the links are kept, and that file is replaced.
fs::path behind_links(fs::path path) {
  std::error_code none;
  for (int links = 0; links < 40 && fs::is_symlink(path, none); ++links) {
    const fs::path target = fs::read_symlink(path, none);
    path = target.is_absolute() ? target : folder_of(path) / target;
  }
  return path;
}

// Throws when `path` exists and is not a regular file.
void check_replaceable(const fs::path& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0 || S_ISREG(status.st_mode)) return;
  fail(ExitCode::kUsage, "{}: is {}, not a file that can be replaced; name another output",
       path.string(), kind(status.st_mode));
}

// Removes the PATH.tmp of a process that was killed; a process that is alive holds its lock.
void remove_left_over(const fs::path& temporary) {
  const FileDescriptor left(
      ::open(temporary.c_str(), O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC));
  if (left.get() >= 0 && ::flock(left.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    fail(ExitCode::kUsage, "{}: another process is writing this file", temporary.string());
  }
  if (::unlink(temporary.c_str()) != 0 && errno != ENOENT) {
    fail_storage("replace", temporary, errno);
  }
}

FileDescriptor create_temporary(const fs::path& temporary) {
  constexpr int kFlags = O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  FileDescriptor fd(::open(temporary.c_str(), kFlags, 0644));
  if (fd.get() < 0 && errno == EEXIST) {
    remove_left_over(temporary);
    fd = FileDescriptor(::open(temporary.c_str(), kFlags, 0644));
  }
  if (fd.get() < 0) fail_storage("create", temporary, errno);
  // Some network file systems have no locks; then two writers of one file are not noticed.
  if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    fail(ExitCode::kUsage, "{}: another process is writing this file", temporary.string());
  }
  return fd;
}

FileDescriptor try_open(const fs::path& path, std::string& problem) {
  // Without O_NONBLOCK, opening a FIFO waits for a writer. On regular files it has no effect.
  FileDescriptor fd(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  struct stat status {};
  if (fd.get() < 0 || ::fstat(fd.get(), &status) != 0) {
    problem = reason(errno);
  } else if (!S_ISREG(status.st_mode)) {
    problem = fmt::format("it is {}, not a regular file", kind(status.st_mode));
  }
  return fd;
}

int sync_file(int fd) {
  int result = 0;
  do {
    result = ::fsync(fd);
  } while (result != 0 && errno == EINTR);
  return result;
}

}  // namespace

// ---- reading

bool is_there(const fs::path& path) {
  std::error_code unreadable;
  return fs::exists(path, unreadable);
}

FileDescriptor open_input(const fs::path& path, ExitCode code, std::string_view hint) {
  std::string problem;
  FileDescriptor fd = try_open(path, problem);
  if (!problem.empty()) fail(code, "{}: cannot open: {}{}", path.string(), problem, hint);
  return fd;
}

std::string read_input(const fs::path& path, ExitCode code, std::string_view hint,
                       size_t max_bytes) {
  std::string problem;
  std::string text = try_read_input(path, max_bytes + 1, problem);
  if (!problem.empty()) fail(code, "{}: cannot read: {}{}", path.string(), problem, hint);
  if (text.size() > max_bytes) {
    fail(code, "{}: more than {} bytes, which is too much for such a file", path.string(),
         max_bytes);
  }
  return text;
}

std::string try_read_input(const fs::path& path, size_t max_bytes, std::string& problem) {
  const FileDescriptor fd = try_open(path, problem);
  std::string text;
  char buffer[64 << 10];
  while (problem.empty() && text.size() < max_bytes) {
    const ssize_t got = ::read(fd.get(), buffer, std::min(sizeof buffer, max_bytes - text.size()));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) problem = reason(errno);
    if (got <= 0) break;
    text.append(buffer, static_cast<size_t>(got));
  }
  return text;
}

// ---- writing

void make_folders(const fs::path& folder) {
  std::vector<fs::path> missing;  // the innermost first
  fs::path there = fs::absolute(folder / "").parent_path();
  for (; there.has_relative_path() && !is_there(there); there = there.parent_path()) {
    missing.push_back(there);
  }
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) fail_storage("create the folder", folder, error.value());
  if (missing.empty()) return;
  // A process that was killed here may have made the outermost one that is there, too.
  sync_entry(there);
  for (auto made = missing.rbegin(); made != missing.rend(); ++made) sync_entry(*made);
}

void make_folder(const fs::path& folder) {
  std::error_code error;
  fs::create_directory(folder, error);
  if (error) fail_storage("create the folder", folder, error.value());
}

void sync_folder(const fs::path& folder) {
  const FileDescriptor fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (fd.get() < 0) fail_storage("open the folder", folder, errno);
  // Some network file systems refuse fsync on folders; they make names durable by themselves.
  if (sync_file(fd.get()) != 0 && errno != EINVAL && errno != ENOTSUP) {
    fail_storage("flush the folder", folder, errno);
  }
}

void sync_entry(const fs::path& path) {
  const fs::path folder = folder_of(fs::absolute(path / "").parent_path());
  if (::access(folder.c_str(), R_OK) == 0) sync_folder(folder);
}

void check_folder_of(const fs::path& output) {
  std::error_code unreadable;
  const fs::path folder = fs::absolute(folder_of(output), unreadable).lexically_normal();
  if (fs::exists(folder, unreadable)) return;
  const fs::path parent = folder.parent_path();
  if (parent != folder.root_path() && fs::exists(parent, unreadable)) return;
  fail(ExitCode::kUsage, "{}: there is no folder {}; if it is the right one, make it: mkdir -p {}",
       output.string(), folder_of(output).string(), folder_of(output).string());
}

AtomicFile::AtomicFile(fs::path path, IoHook hook, MissingFolders missing)
    : path_(behind_links(std::move(path))),
      temporary_(with_suffix(path_, ".tmp")),
      hook_(std::move(hook)) {
  check_replaceable(path_);
  if (missing == MissingFolders::kMakeLast) check_folder_of(path_);
  before("create");
  if (missing != MissingFolders::kError) make_folders(folder_of(path_));
  fd_ = create_temporary(temporary_);
}

AtomicFile::~AtomicFile() {
  if (!committed_ && fd_.get() >= 0) ::unlink(temporary_.c_str());
}

void AtomicFile::before(std::string_view operation) const {
  if (!hook_) return;
  if (const int error = hook_(operation, temporary_)) fail_storage(operation, temporary_, error);
}

void AtomicFile::write(const void* data, size_t bytes) {
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    before("write");
    const ssize_t written = ::write(fd_.get(), from, bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) fail_storage("write", temporary_, written == 0 ? ENOSPC : errno);
    from += written;
    bytes -= static_cast<size_t>(written);
  }
}

void AtomicFile::commit() {
  before("flush");
  if (sync_file(fd_.get()) != 0) fail_storage("flush", temporary_, errno);
  before("rename");
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) {
    fail(ExitCode::kStorage, "{}: cannot rename it to {}: {}", temporary_.string(), path_.string(),
         reason(errno));
  }
  committed_ = true;
  // Closed only after the rename: until then the lock keeps other writers of this file away.
  if (::close(fd_.release()) != 0 && errno != EINTR) fail_storage("close", path_, errno);
  before("flush folder");
  sync_folder(folder_of(path_));
}

void replace_file(const fs::path& path, std::string_view content, IoHook hook,
                  MissingFolders missing) {
  AtomicFile file(path, std::move(hook), missing);
  file.write(content);
  file.commit();
}

FileDescriptor open_scratch(const fs::path& folder) {
  FileDescriptor fd(::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  if (fd.get() >= 0) return fd;
  // This file system has no files without names, so the file gets a name and loses it at once.
  std::string name = (folder / ".sbtrain-XXXXXX").string();
  fd = FileDescriptor(::mkostemp(name.data(), O_CLOEXEC));
  if (fd.get() < 0) fail_storage("create a temporary file in", folder, errno);
  ::unlink(name.c_str());
  return fd;
}

void write_at(int fd, const fs::path& path, int64_t offset, const void* data, int64_t bytes) {
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t put = ::pwrite(fd, from, static_cast<size_t>(bytes), offset);
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) fail_storage("write", path, put == 0 ? ENOSPC : errno);
    from += put;
    offset += put;
    bytes -= put;
  }
}

void check_output(const fs::path& output, std::span<const std::string> inputs) {
  const fs::path path = behind_links(output);
  check_replaceable(path);
  check_folder_of(path);
  for (const fs::path& written : {path, with_suffix(path, ".tmp")}) {
    for (const std::string& input : inputs) {
      std::error_code missing;
      if (!fs::equivalent(written, input, missing)) continue;
      fail(ExitCode::kUsage, "{}: is an input, which writing {} would destroy; name another output",
           input, output.string());
    }
  }
}

fs::path set_aside(const fs::path& path) {
  for (int n = 1;; ++n) {
    fs::path free = with_suffix(path, n == 1 ? ".old" : fmt::format(".old.{}", n));
    if (::renameat2(AT_FDCWD, path.c_str(), AT_FDCWD, free.c_str(), RENAME_NOREPLACE) == 0) {
      return free;
    }
    if (errno == EEXIST) continue;
    // This file system cannot rename and check in one step.
    if (errno != EINVAL && errno != ENOSYS) fail_storage("rename", path, errno);
    if (fs::exists(fs::symlink_status(free))) continue;
    if (::rename(path.c_str(), free.c_str()) != 0) fail_storage("rename", path, errno);
    return free;
  }
}

}  // namespace sbtrain
