// Runs programs from tests.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace sbtrain::test {

// A child process whose stdout and stderr go to one file. Killed when destroyed while running.
class Process {
 public:
  // `environment` is added to this process's own.
  Process(const std::vector<std::string>& command, const std::filesystem::path& log,
          const std::map<std::string, std::string>& environment = {});
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  void signal(int number) const;
  bool running();
  // Exit code, or 128 + signal number. Kills the child and fails the test after `seconds`.
  int wait(double seconds = 120);
  std::string output() const;

 private:
  std::filesystem::path log_;
  pid_t pid_ = -1;
  int status_ = -1;  // exit code once it has ended
};

std::string read_file(const std::filesystem::path& path);
void write_file(const std::filesystem::path& path, const std::string& text);

// A fresh folder, removed with everything in it when the object goes.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

}  // namespace sbtrain::test
