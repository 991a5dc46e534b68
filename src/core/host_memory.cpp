#include "core/host_memory.h"

#include <sys/resource.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <initializer_list>
#include <limits>
#include <optional>
#include <sstream>
#include <string_view>

namespace sbtrain {
namespace {

namespace fs = std::filesystem;

constexpr size_t kNone = std::numeric_limits<size_t>::max();

std::string text_of(const fs::path& file) {
  std::ifstream stream(file);
  return {std::istreambuf_iterator<char>(stream), {}};
}

// The number at the beginning of `text`; nothing for other words, such as "max".
std::optional<size_t> number(const std::string& text) {
  std::istringstream stream(text);
  size_t value = 0;
  if (stream >> value) return value;
  return {};
}

// The number after `key` at the beginning of a line, as in meminfo, status and memory.stat.
std::optional<size_t> field(const std::string& text, std::string_view key) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(key)) return number(line.substr(key.size()));
  }
  return {};
}

class Limits {
 public:
  explicit Limits(fs::path root) : root_(std::move(root)) {}

  HostMemory least() {
    machine();
    commit_limit();
    control_groups();
    process_limit(RLIMIT_AS, "VmSize:", "the limit of the address space (ulimit -v)");
    process_limit(RLIMIT_DATA, "VmData:", "the limit of data (ulimit -d)");
    return least_;
  }

 private:
  std::string read(const std::string& path) const { return text_of(root_ / path.substr(1)); }

  void add(std::string limit, size_t total, size_t used, bool of_process = false) {
    const size_t free = total > used ? total - used : 0;
    if (free < least_.free) least_ = {free, total, std::move(limit), of_process};
  }

  void machine() {
    const std::string info = read("/proc/meminfo");
    const auto total = field(info, "MemTotal:");
    const auto available = field(info, "MemAvailable:");
    if (total && available) add("the machine", *total << 10, (*total - *available) << 10);
  }

  // Mode 2 refuses allocations beyond a limit; the other modes let a process ask for more memory
  // than there is, and kill it when it uses that memory.
  void commit_limit() {
    if (number(read("/proc/sys/vm/overcommit_memory")) != size_t{2}) return;
    const std::string info = read("/proc/meminfo");
    const auto total = field(info, "CommitLimit:");
    const auto used = field(info, "Committed_AS:");
    if (total && used) add("the machine's commit limit", *total << 10, *used << 10);
  }

  void process_limit(decltype(RLIMIT_AS) resource, std::string_view key, const char* name) {
    struct rlimit limit {};
    if (getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
    add(name, limit.rlim_cur, field(read("/proc/self/status"), key).value_or(0) << 10,
        /*of_process=*/true);
  }

  // ---- control groups

  // Lines are "ID:CONTROLLERS:PATH"; version 2 has no controllers there.
  void control_groups() {
    std::istringstream lines(read("/proc/self/cgroup"));
    for (std::string line; std::getline(lines, line);) {
      const size_t first = line.find(':');
      const size_t second = line.find(':', first + 1);
      if (second == std::string::npos) continue;
      const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
      const bool unified = controllers == ",,";
      if (!unified && controllers.find(",memory,") == std::string::npos) continue;
      groups(line.substr(second + 1), unified);
    }
  }

  // A group's limits hold for all groups inside it.
  void groups(const std::string& path, bool unified) {
    const auto [mounted, mount] = mount_of(unified);
    if (mount.empty()) return;
    // The part of `path` below the group that is mounted. A process in another namespace has a path
    // that is not below it; then at least the mounted group is known.
    std::string inside = path;
    if (mounted != "/") {
      const bool below = path == mounted || path.starts_with(mounted + "/");
      inside = below ? path.substr(mounted.size()) : "";
    }
    if (inside.find("..") != std::string::npos) inside.clear();
    while (inside.ends_with('/')) inside.pop_back();
    while (true) {
      const std::string name = inside.empty() ? "/" : inside;
      unified ? group_v2(mount + inside, name) : group_v1(mount + inside, name);
      if (inside.empty()) return;
      inside.erase(inside.rfind('/'));
    }
  }

  // The group at the root of the mounted hierarchy, and where it is mounted. A line of mountinfo is
  // "ID PARENT DEVICE ROOT MOUNT_POINT OPTIONS [TAG...] - TYPE SOURCE SUPER_OPTIONS".
  std::pair<std::string, std::string> mount_of(bool unified) const {
    std::istringstream lines(read("/proc/self/mountinfo"));
    for (std::string line; std::getline(lines, line);) {
      const size_t dash = line.find(" - ");
      if (dash == std::string::npos) continue;
      std::istringstream before(line), after(line.substr(dash + 3));
      std::string id, parent, device, mounted, mount, type, source, options;
      before >> id >> parent >> device >> mounted >> mount;
      after >> type >> source >> options;
      const bool memory = ("," + options + ",").find(",memory,") != std::string::npos;
      if (unified ? type == "cgroup2" : type == "cgroup" && memory) return {mounted, mount};
    }
    return {};
  }

  // The sum of those numbers of memory.stat that stand for memory the kernel can take back.
  size_t droppable(const std::string& folder, std::initializer_list<std::string_view> keys) const {
    const std::string stat = read(folder + "/memory.stat");
    size_t sum = 0;
    for (const std::string_view key : keys) sum += field(stat, key).value_or(0);
    return sum;
  }

  void group(const std::string& folder, const std::string& name, const char* limit_file,
             const char* usage_file, size_t droppable) {
    const auto limit = number(read(folder + "/" + limit_file));
    const auto used = number(read(folder + "/" + usage_file));
    if (!limit || !used) return;
    add("cgroup " + name + " (" + limit_file + ")", *limit, *used - std::min(*used, droppable));
  }

  void group_v2(const std::string& folder, const std::string& name) {
    const size_t cache = droppable(folder, {"inactive_file ", "active_file ", "slab_reclaimable "});
    // Beyond memory.high the kernel slows a process down until it hardly runs.
    for (const char* limit : {"memory.max", "memory.high"}) {
      group(folder, name, limit, "memory.current", cache);
    }
  }

  void group_v1(const std::string& folder, const std::string& name) {
    const size_t cache = droppable(folder, {"total_inactive_file ", "total_active_file "});
    group(folder, name, "memory.limit_in_bytes", "memory.usage_in_bytes", cache);
  }

  fs::path root_;
  HostMemory least_{kNone, kNone, ""};
};

}  // namespace

HostMemory host_memory(const fs::path& root) {
  return Limits(root).least();
}

}  // namespace sbtrain
