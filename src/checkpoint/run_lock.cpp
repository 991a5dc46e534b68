#include "checkpoint/run_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>

#include "core/error.h"
#include "core/host_name.h"
#include "core/log.h"

namespace sbtrain {
namespace fs = std::filesystem;
namespace {

std::string holder(int fd) {
  char text[512] = {};
  const ssize_t length = ::pread(fd, text, sizeof(text) - 1, 0);
  std::string line(text, length > 0 ? static_cast<size_t>(length) : 0);
  if (const size_t end = line.find('\n'); end != std::string::npos) line.resize(end);
  return line.empty() ? "another process" : line;
}

}  // namespace

RunLock::RunLock(const fs::path& run) : run_(fs::absolute(run)) {
  Storage().make_folders(run);
  sync_entry(run_);  // made by whomever: its checkpoints are to survive a power failure
  const fs::path path = run / "lock";
  // Closed on exec, since a program started by this one must not keep the lock.
  fd_ = FileDescriptor(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  if (fd_.get() < 0) {
    fail(ExitCode::kStorage, "cannot open {}: {}", path.string(),
         std::generic_category().message(errno));
  }
  if (::flock(fd_.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK) {
      fail(ExitCode::kUsage,
           "the run folder {} is in use by {}; stop that job or choose another folder (out)",
           run.string(), holder(fd_.get()));
    }
    log_warning("cannot lock {}: {}; make sure that no other job uses this folder", path.string(),
                std::generic_category().message(errno));
  }
  const std::string text = fmt::format("pid {} on host {}\n", ::getpid(), host_name());
  if (::ftruncate(fd_.get(), 0) != 0 ||
      ::pwrite(fd_.get(), text.data(), text.size(), 0) != static_cast<ssize_t>(text.size())) {
    log_warning("cannot write {}: {}", path.string(), std::generic_category().message(errno));
  }
}

void RunLock::check() const {
  struct stat held {};
  struct stat there {};
  const fs::path path = run_ / "lock";
  if (::fstat(fd_.get(), &held) != 0) return;
  if (::stat(path.c_str(), &there) == 0) {
    if (held.st_dev == there.st_dev && held.st_ino == there.st_ino) return;
  } else if (errno != ENOENT && errno != ENOTDIR) {
    return;  // the file system does not answer now, which says nothing about the folder
  }
  fail(ExitCode::kStorage,
       "{} is not the run folder any more: it was moved or removed during the run, which ends "
       "here; its checkpoints are where the folder is now",
       run_.string());
}

RunLock::~RunLock() {
  // The file stays: removing it would let two jobs lock two different files of the same name.
  if (fd_.get() >= 0 && ::ftruncate(fd_.get(), 0) != 0) {
    log_debug("cannot clear the lock file: {}", std::generic_category().message(errno));
  }
}

}  // namespace sbtrain
