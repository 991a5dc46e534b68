#include "train/host_share.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/host_memory.h"

namespace sbtrain {
namespace {

std::string to_text(const HostShare& share) {
  return fmt::format("{} {} {}", share.node, share.bytes, share.free);
}

HostShare to_share(const std::string& text) {
  std::istringstream words(text);
  HostShare share;
  words >> share.node >> share.bytes >> share.free;
  return share;
}

}  // namespace

void require_shared_memory(Control& control, const HostShare& mine, std::string_view what) {
  HostShare all{.node = mine.node, .free = SIZE_MAX};
  int ranks = 0;
  for (const std::string& text :
       control.exchange("host memory", all_ranks(control.world()), to_text(mine))) {
    const HostShare share = to_share(text);
    if (share.node != mine.node) continue;
    ++ranks;
    all.bytes += share.bytes;
    all.free = std::min(all.free, share.free);
  }
  if (ranks < 2 || all.bytes <= all.free) return;
  fail(ExitCode::kOutOfMemory,
       "out of memory: {} needs {:.2f} GiB of the host's memory for the {} ranks of this machine "
       "together, and {:.2f} GiB are free. Start fewer ranks on it, or spread them over more "
       "machines",
       what, gibibytes(all.bytes), ranks, gibibytes(all.free));
}

void require_shared_memory(Control& control, int node, size_t bytes, std::string_view what) {
  if (control.world() == 1) return;
  const HostMemory host = host_memory();
  require_shared_memory(
      control, {.node = node, .bytes = bytes, .free = host.of_process ? SIZE_MAX : host.free},
      what);
}

}  // namespace sbtrain
