// How much memory this process may still take on the host, under all the limits that apply to it.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>

namespace sbtrain {

struct HostMemory {
  size_t free = 0;          // bytes that can still be taken
  size_t total = 0;         // bytes under the same limit, in use or not
  std::string limit;        // what limits them most: "the machine", "cgroup /job (memory.max)", ...
  bool of_process = false;  // a limit of this process alone (ulimit), not of those beside it
};

// The least that any of these leaves: the machine's available memory, the commit limit where the
// system does not overcommit, memory.max and memory.high of the process's cgroup and of all groups
// around it (versions 1 and 2), `ulimit -v` and `ulimit -d`. Page cache that the kernel can drop
// counts as free. `root` replaces "/" in tests. A limit that cannot be read is none; without any,
// both sizes are SIZE_MAX.
HostMemory host_memory(const std::filesystem::path& root = "/");

// For messages.
inline double gibibytes(size_t bytes) {
  return static_cast<double>(bytes) / (1 << 30);
}

}  // namespace sbtrain
