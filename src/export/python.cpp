#include "export/python.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "core/error.h"
#include "core/file_descriptor.h"

namespace sbtrain {
namespace fs = std::filesystem;

std::string python_interpreter() {
  const char* given = std::getenv("SBTRAIN_PYTHON");
  if (given != nullptr && *given != '\0') return given;
  std::error_code unreadable;
  const fs::path program = fs::read_symlink("/proc/self/exe", unreadable);
  // The program of a build lies in build/PRESET/.
  const fs::path root = program.parent_path().parent_path().parent_path();
  for (const fs::path& path : {root / ".venv/bin/python3", fs::path("/usr/bin/python3")}) {
    if (access(path.c_str(), X_OK) == 0) return path.string();
  }
  return "python3";
}

PythonResult run_python(const PythonFile& script, const std::vector<std::string>& arguments) {
  const std::string python = python_interpreter();
  std::vector<std::string> words = {python, "-c", std::string(script.text)};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);

  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) {
    fail(ExitCode::kStorage, "cannot make a pipe: {}", std::strerror(errno));
  }
  const FileDescriptor reader(ends[0]);
  FileDescriptor writer(ends[1]);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, writer.get(), 1);
  posix_spawn_file_actions_adddup2(&actions, writer.get(), 2);
  pid_t child = 0;
  const int problem = posix_spawnp(&child, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  writer = FileDescriptor();
  if (problem != 0) {
    fail(ExitCode::kUsage, "cannot run the Python interpreter {}: {}; set SBTRAIN_PYTHON", python,
         std::strerror(problem));
  }
  PythonResult result;
  char buffer[4096];
  for (ssize_t got = 0;
       (got = read(reader.get(), buffer, sizeof(buffer))) > 0 || (got < 0 && errno == EINTR);) {
    if (got > 0) result.output.append(buffer, static_cast<size_t>(got));
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  result.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return result;
}

}  // namespace sbtrain
