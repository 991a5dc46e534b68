#include "core/python.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "core/error.h"
#include "core/files.h"

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

}  // namespace

std::string python_interpreter() {
  if (const char* given = std::getenv("SBTRAIN_PYTHON"); given && *given) return given;
  std::error_code none;
  // In a source tree the program is build/PRESET/sbtrain.
  for (fs::path folder = fs::read_symlink("/proc/self/exe", none); folder.has_relative_path();) {
    folder = folder.parent_path();
    const fs::path python = folder / ".venv/bin/python3";
    if (fs::exists(python, none)) return python.string();
  }
  return fs::exists("/usr/bin/python3", none) ? "/usr/bin/python3" : "python3";
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
