// Memory of a host that several ranks share.
#pragma once

#include <cstddef>
#include <string_view>

#include "job/control.h"

namespace sbtrain {

// Throws ExitCode::kOutOfMemory if the ranks on this rank's node together need more of the host's
// memory than it has free; each of them alone has a check of its own (core/memory_check.h). Every
// rank calls it before it takes the `bytes` that it needs for `what`: no rank goes on before all
// have seen what is free.
void require_shared_memory(Control& control, int node, size_t bytes, std::string_view what);

// The same with what this rank finds free.
struct HostShare {
  int node = 0;
  size_t bytes = 0;  // needed
  size_t free = 0;   // of the machine or a control group; SIZE_MAX: unknown
};
void require_shared_memory(Control& control, const HostShare& mine, std::string_view what);

}  // namespace sbtrain
