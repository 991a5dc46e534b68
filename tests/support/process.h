// Runs programs from tests.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace sbtrain::test {

// A child process whose stdout and stderr go to one file. The destructor kills it if it still runs.
class Process {
 public:
  // `environment` is added to the environment of this process.
  Process(const std::vector<std::string>& command, const std::filesystem::path& log,
          const std::map<std::string, std::string>& environment = {});
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  void signal(int number) const;
  bool running();
  // Returns the exit code, or 128 + signal number. After `seconds` it kills the child and fails the
  // test.
  int wait(double seconds = 120);
  std::string output() const;

 private:
  std::filesystem::path log_;
  pid_t pid_ = -1;
  int status_ = -1;  // exit code once it has ended
};

// What a child that is mpirun needs in its environment, and its ranks.
std::map<std::string, std::string> rank_environment();

std::string read_file(const std::filesystem::path& path);
void write_file(const std::filesystem::path& path, const std::string& text);

// A new folder, removed with everything in it by the destructor.
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
