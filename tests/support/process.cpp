#include "support/process.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <thread>

namespace sbtrain::test {
namespace {

int exit_code(int status) {
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace

Process::Process(const std::vector<std::string>& command, const std::filesystem::path& log,
                 const std::map<std::string, std::string>& environment)
    : log_(log) {
  std::vector<char*> arguments;
  for (const std::string& argument : command) {
    arguments.push_back(const_cast<char*>(argument.c_str()));  // NOLINT: execvp's signature
  }
  arguments.push_back(nullptr);
  pid_ = fork();
  if (pid_ != 0) return;
  const int fd = open(log.c_str(), O_CREAT | O_WRONLY | O_TRUNC, 0644);
  dup2(fd, STDOUT_FILENO);
  dup2(fd, STDERR_FILENO);
  close(STDIN_FILENO);
  for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
  execvp(arguments[0], arguments.data());
  _exit(127);
}

Process::~Process() {
  if (running()) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
}

void Process::signal(int number) const {
  if (status_ < 0) kill(pid_, number);
}

bool Process::running() {
  if (status_ >= 0) return false;
  int status = 0;
  if (waitpid(pid_, &status, WNOHANG) == 0) return true;
  status_ = exit_code(status);
  return false;
}

int Process::wait(double seconds) {
  using Clock = std::chrono::steady_clock;
  auto deadline = Clock::now() + std::chrono::duration<double>(seconds);
  while (running()) {
    if (Clock::now() > deadline) {
      ADD_FAILURE() << "still running after " << seconds << " s:\n" << output();
      kill(pid_, SIGKILL);
      deadline = decltype(deadline)::max();  // one that holds a GPU takes a while to end
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return status_;
}

std::string Process::output() const {
  return read_file(log_);
}

std::map<std::string, std::string> rank_environment() {
  const char* options = std::getenv("ASAN_OPTIONS");
  return {{"OMP_WAIT_POLICY", "passive"},
          {"OMP_NUM_THREADS", "1"},
          // The reads of other processes' memory that Open MPI likes to use are forbidden in
          // containers.
          {"OMPI_MCA_btl_vader_single_copy_mechanism", "none"},
          // Open MPI's plugins leave memory behind, and are unloaded before leaks are looked for,
          // so that no suppression can name them. Leaks of our own are found by tests with threads
          // as ranks.
          {"ASAN_OPTIONS", std::string(options == nullptr ? "" : options) + ":detect_leaks=0"}};
}

std::string read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

void write_file(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

TemporaryFolder::TemporaryFolder() {
  std::string name = (std::filesystem::temp_directory_path() / "sbtrain-test-XXXXXX").string();
  if (!mkdtemp(name.data())) throw std::runtime_error("no temporary folder: " + name);
  path_ = name;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace sbtrain::test
