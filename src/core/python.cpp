#include "core/python.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "core/error.h"
#include "core/files.h"
#include "core/log.h"

namespace sbtrain {
namespace {

namespace fs = std::filesystem;

// A file in memory, which unlike a pipe holds any number of bytes that nobody has read yet.
FileDescriptor memory_file(const std::string& purpose) {
  FileDescriptor fd(::memfd_create("sbtrain", MFD_CLOEXEC));
  if (fd.get() < 0) {
    fail(ExitCode::kOutOfMemory, "{}: cannot create a file in memory: {}", purpose,
         std::strerror(errno));
  }
  return fd;
}

class SpawnAttributes {
 public:
  SpawnAttributes() {
    posix_spawn_file_actions_init(&actions_);
    posix_spawnattr_init(&attributes_);
    // The child begins with a clean slate, whatever signals this process blocks or ignores.
    sigset_t none;
    sigset_t all;
    sigemptyset(&none);
    sigfillset(&all);
    posix_spawnattr_setsigmask(&attributes_, &none);
    posix_spawnattr_setsigdefault(&attributes_, &all);
    posix_spawnattr_setpgroup(&attributes_, 0);
    posix_spawnattr_setflags(
        &attributes_, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP);
  }
  ~SpawnAttributes() {
    posix_spawnattr_destroy(&attributes_);
    posix_spawn_file_actions_destroy(&actions_);
  }
  SpawnAttributes(const SpawnAttributes&) = delete;
  SpawnAttributes& operator=(const SpawnAttributes&) = delete;

  void connect(int fd, int as) { posix_spawn_file_actions_adddup2(&actions_, fd, as); }
  const posix_spawn_file_actions_t* actions() const { return &actions_; }
  const posix_spawnattr_t* attributes() const { return &attributes_; }

 private:
  posix_spawn_file_actions_t actions_{};
  posix_spawnattr_t attributes_{};
};

// Why a file must not be run for the user; empty if it may be. A group of the owner's own number is
// the owner's alone. A link is as trustworthy as the link itself and what it leads to.
std::string why_not_trusted(const fs::path& path, const std::vector<uid_t>& owners) {
  struct stat link {};
  struct stat target {};
  if (::lstat(path.c_str(), &link) != 0 || ::stat(path.c_str(), &target) != 0) {
    return std::strerror(errno);
  }
  for (const struct stat& status : {link, target}) {
    if (std::find(owners.begin(), owners.end(), status.st_uid) == owners.end()) {
      return fmt::format("belongs to user {}", status.st_uid);
    }
    if (S_ISLNK(status.st_mode)) continue;  // has no permissions of its own
    const bool shared_group = status.st_gid != 0 && status.st_gid != status.st_uid;
    if ((status.st_mode & S_IWOTH) != 0 || ((status.st_mode & S_IWGRP) != 0 && shared_group)) {
      return "can be written by others";
    }
  }
  return "";
}

}  // namespace

std::string own_python(const std::string& program) {
  const fs::path folder = fs::path(program).parent_path();
  fs::path root;
  if (folder.filename() == "bin") root = folder.parent_path();
  if (folder.parent_path().filename() == "build") root = folder.parent_path().parent_path();
  const fs::path python = root / ".venv/bin/python3";
  std::error_code none;
  if (root.empty() || !fs::exists(python, none)) return "";
  std::vector<uid_t> owners = {0, ::geteuid()};
  struct stat status {};
  if (::stat(program.c_str(), &status) == 0) owners.push_back(status.st_uid);
  for (const fs::path& path : {root / ".venv", root / ".venv/bin", python}) {
    const std::string reason = why_not_trusted(path, owners);
    if (reason.empty()) continue;
    log_warning("{} is not used: {} {}", python.string(), path.string(), reason);
    return "";
  }
  return python.string();
}

std::string python_interpreter() {
  if (const char* given = std::getenv("SBTRAIN_PYTHON"); given && *given) return given;
  std::error_code none;
  if (const char* active = std::getenv("VIRTUAL_ENV"); active && *active) {
    const fs::path python = fs::path(active) / "bin/python3";
    if (fs::exists(python, none)) return python.string();
  }
  static const std::string own = own_python(fs::read_symlink("/proc/self/exe").string());
  return own.empty() ? "python3" : own;
}

std::string python_advice(std::string_view package) {
  return fmt::format(
      "`scripts/setup.sh python` in sbtrain's source tree installs it; so do `python3 -m venv "
      "~/sbtrain-python && ~/sbtrain-python/bin/pip install {}` and then "
      "SBTRAIN_PYTHON=~/sbtrain-python/bin/python3",
      package);
}

PythonHelper::PythonHelper(std::string_view program, const std::vector<std::string>& arguments,
                           std::string_view input, const std::string& purpose)
    : interpreter_(python_interpreter()), errors_(memory_file(purpose)) {
  const FileDescriptor stdin_file = memory_file(purpose);
  write_at(stdin_file.get(), purpose, 0, input.data(), static_cast<int64_t>(input.size()));
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    fail(ExitCode::kOutOfMemory, "{}: cannot create a pipe: {}", purpose, std::strerror(errno));
  }
  output_ = FileDescriptor(ends[0]);
  const FileDescriptor child_output(ends[1]);
  // Room for a few documents, so that both processes work at the same time. Fewer bytes do as well.
  ::fcntl(child_output.get(), F_SETPIPE_SZ, 1 << 20);

  std::vector<std::string> command = {interpreter_, "-c", std::string(program)};
  command.insert(command.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : command) argv.push_back(word.data());
  argv.push_back(nullptr);
  SpawnAttributes spawn;
  spawn.connect(stdin_file.get(), STDIN_FILENO);
  spawn.connect(child_output.get(), STDOUT_FILENO);
  spawn.connect(errors_.get(), STDERR_FILENO);
  const int error = ::posix_spawnp(&pid_, interpreter_.c_str(), spawn.actions(), spawn.attributes(),
                                   argv.data(), environ);
  if (error != 0) {
    pid_ = -1;
    fail(ExitCode::kData,
         "{}: cannot run {}: {}; install Python 3, or set SBTRAIN_PYTHON to its path", purpose,
         interpreter_, std::strerror(error));
  }
}

PythonHelper::~PythonHelper() {
  if (pid_ < 0) return;
  ::kill(pid_, SIGKILL);
  wait();
}

PythonHelper::Result PythonHelper::wait() {
  int status = 0;
  while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
  pid_ = -1;
  Result result{.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status)};
  result.errors.resize(4096);
  const off_t end = ::lseek(errors_.get(), 0, SEEK_END);
  const off_t begin = std::max<off_t>(0, end - static_cast<off_t>(result.errors.size()));
  const ssize_t got = ::pread(errors_.get(), result.errors.data(), result.errors.size(), begin);
  result.errors.resize(got > 0 ? static_cast<size_t>(got) : 0);
  while (result.errors.ends_with('\n')) result.errors.pop_back();
  return result;
}

}  // namespace sbtrain
