#include "job/root_watch.h"

#include <dirent.h>
#include <unistd.h>

#include <charconv>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "core/error.h"

namespace sbtrain::control {
namespace {

// A launcher has started rank 0 by then, if it has started this rank.
constexpr std::chrono::seconds kStartPatience{3};

// The variables with which a process was started; nothing if this process may not read them.
std::optional<Environment> environment_of(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/environ", pid), std::ios::binary);
  if (!file) return std::nullopt;
  Environment environment;
  for (std::string entry; std::getline(file, entry, '\0');) {
    const size_t equals = entry.find('=');
    if (equals != std::string::npos)
      environment[entry.substr(0, equals)] = entry.substr(equals + 1);
  }
  if (file.bad()) return std::nullopt;
  return environment;
}

// 0: it has none that can be seen from here.
pid_t parent_of(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string text{std::istreambuf_iterator<char>(file), {}};
  // The name before it may hold anything.
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos || name_end + 4 > text.size()) return 0;
  pid_t parent = 0;
  std::from_chars(text.data() + name_end + 4, text.data() + text.size(), parent);
  return parent;
}

std::optional<Launch> launch_of(const Environment& environment) {
  try {
    return find_launch(environment);
  } catch (const Error&) {
    return std::nullopt;
  }
}

bool same_job(const std::optional<Launch>& other, const Launch& launch) {
  return other && other->launcher == launch.launcher && other->world == launch.world &&
         other->token == launch.token;
}

// Whether a process around this one is no part of the rank: the launcher, whose other children can
// be seen as well then.
bool sees_launcher(const Launch& launch) {
  for (pid_t pid = ::getppid(); pid > 0; pid = parent_of(pid)) {
    const std::optional<Environment> environment = environment_of(pid);
    if (!environment || !same_job(launch_of(*environment), launch)) return true;
  }
  return false;
}

// Those that set RANK may be people who start one rank after the other.
bool starts_all(const Launch& launch) {
  if (launch.launcher == "torchrun") return process_environment().contains("TORCHELASTIC_RUN_ID");
  return launch.launcher == "mpirun" || launch.launcher == "srun";
}

}  // namespace

RootWatch::RootWatch(const Launch& launch)
    : launch_(launch),
      can_see_(launch.node == 0 && same_job(launch_of(process_environment()), launch) &&
               sees_launcher(launch)),
      starts_all_(starts_all(launch)) {}

bool RootWatch::ended() {
  if (!can_see_ || Clock::now() < next_) return false;
  next_ = Clock::now() + std::chrono::seconds(1);
  if (look()) {
    seen_ = true;
    missed_ = 0;
    return false;
  }
  // A second look: a process may have been replaced while the list was read.
  const bool was_there = seen_ || (starts_all_ && Clock::now() - begin_ >= kStartPatience);
  return ++missed_ >= 2 && was_there;
}

bool RootWatch::is_rank_zero(pid_t pid) const {
  const std::optional<Environment> environment = environment_of(pid);
  if (!environment) return false;
  const std::optional<Launch> other = launch_of(*environment);
  return same_job(other, launch_) && other->rank == 0;
}

bool RootWatch::look() {
  const std::unique_ptr<DIR, int (*)(DIR*)> processes(::opendir("/proc"), &::closedir);
  if (!processes) return true;
  while (const dirent* entry = ::readdir(processes.get())) {
    const std::string_view name = entry->d_name;
    pid_t pid = 0;
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), pid);
    if (error != std::errc() || end != name.data() + name.size()) continue;
    if (is_rank_zero(pid)) return true;
  }
  return false;
}

}  // namespace sbtrain::control
