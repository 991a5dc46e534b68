#include "cli/child_runs.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <sstream>

#include "core/error.h"
#include "job/launch.h"

namespace sbtrain {
namespace {

// Words as execve() takes them.
class Words {
 public:
  explicit Words(std::vector<std::string> words) : words_(std::move(words)) {
    for (std::string& word : words_) pointers_.push_back(word.data());
    pointers_.push_back(nullptr);
  }
  char* const* data() const { return pointers_.data(); }

 private:
  std::vector<std::string> words_;
  std::vector<char*> pointers_;
};

std::vector<std::string> environment_of(const ChildSlot& slot) {
  Environment variables = process_environment();
  if (!slot.gpus.empty()) variables["CUDA_VISIBLE_DEVICES"] = slot.gpus;
  if (slot.threads > 0) {
    variables.try_emplace("OMP_NUM_THREADS", std::to_string(slot.threads));
  }
  std::vector<std::string> entries;
  for (const auto& [name, value] : variables) entries.push_back(fmt::format("{}={}", name, value));
  return entries;
}

int open_log(const std::filesystem::path& log) {
  std::error_code failed;
  std::filesystem::create_directories(log.parent_path(), failed);
  const int file = ::open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (file < 0) {
    fail(ExitCode::kStorage, "cannot write {}: {}", log.string(), std::strerror(errno));
  }
  return file;
}

// `output`: a descriptor that replaces standard output and standard error, or -1.
pid_t start_child(const Words& arguments, const Words& environment, int output) {
  const pid_t parent = getpid();
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child < 0) {
    fail(ExitCode::kOutOfMemory, "cannot start a training run: {}", std::strerror(errno));
  }
  if (child > 0) return child;
  // Only calls that are safe between fork and exec.
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (getppid() != parent) _exit(static_cast<int>(ExitCode::kPreempted));
  if (output >= 0) {
    dup2(output, STDOUT_FILENO);
    dup2(output, STDERR_FILENO);
  }
  execve("/proc/self/exe", arguments.data(), environment.data());
  _exit(static_cast<int>(ExitCode::kInternal));
}

}  // namespace

std::vector<ChildSlot> make_slots(int jobs, int gpus, const std::string& visible, int processors) {
  const int count = jobs > 0 ? jobs : std::max(gpus, 1);
  std::vector<ChildSlot> slots(static_cast<size_t>(count));
  if (count == 1) return slots;
  std::vector<std::string> names;
  std::istringstream list(visible);
  for (std::string name; std::getline(list, name, ',');) names.push_back(name);
  for (int gpu = static_cast<int>(names.size()); gpu < gpus; ++gpu) {
    names.push_back(std::to_string(gpu));
  }
  const int share = std::max(gpus / count, 1);
  for (int n = 0; n < count; ++n) {
    if (gpus > 0) {
      const auto first = names.begin() + n * share % gpus;
      slots[n].gpus = fmt::format("{}", fmt::join(first, first + share, ","));
    }
    // Each GPU of a slot has a rank, and all ranks of the slot get this setting.
    slots[n].threads = std::max(1, processors / (count * share));
  }
  return slots;
}

ChildRuns::ChildRuns(std::vector<ChildSlot> slots) : slots_(std::move(slots)) {}

size_t ChildRuns::free_slot() const {
  size_t slot = 0;
  while (std::ranges::count(running_, slot, &Child::slot) > 0) ++slot;
  require(slot < slots_.size(), "all {} slots have a child", slots_.size());
  return slot;
}

void ChildRuns::start(size_t id, const std::vector<std::string>& arguments,
                      const std::filesystem::path& log) {
  std::vector<std::string> words = arguments;
  words.insert(words.begin(), "sbtrain");
  Child child{.id = id, .slot = free_slot(), .start = std::chrono::steady_clock::now()};
  const int output = log.empty() ? -1 : open_log(log);
  try {
    child.pid =
        start_child(Words(std::move(words)), Words(environment_of(slots_[child.slot])), output);
  } catch (...) {
    if (output >= 0) ::close(output);
    throw;
  }
  if (output >= 0) ::close(output);
  running_.push_back(child);
}

std::optional<ChildRuns::Ended> ChildRuns::take_ended() {
  for (auto child = running_.begin(); child != running_.end(); ++child) {
    int status = 0;
    const pid_t waited = waitpid(child->pid, &status, WNOHANG);
    if (waited == 0) continue;
    if (waited < 0) fail(ExitCode::kInternal, "a training run is lost: {}", std::strerror(errno));
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - child->start;
    const Ended ended{.id = child->id,
                      .code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status),
                      .seconds = time.count()};
    running_.erase(child);
    return ended;
  }
  return std::nullopt;
}

void ChildRuns::signal(int number) const {
  for (const Child& child : running_) ::kill(child.pid, number);
}

}  // namespace sbtrain
