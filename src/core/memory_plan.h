// The record of a program's allocations, and their offsets in one pool. Internal to Memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/memory.h"
#include "core/stream_order.h"

namespace sbtrain {

inline constexpr size_t kMemoryAlignment = 256;

// `bytes` rounded up to whole units of kMemoryAlignment: at least one, so that every buffer has an
// address of its own.
size_t aligned(size_t bytes);

// One allocation of a program. The host asks for it at moment `begin` and gives it back at moment
// `end`; moments count the allocations, releases, records and waits of the program.
struct Slot {
  MemoryClass memory_class{};
  std::string name;
  size_t bytes = 0;
  int64_t begin = 0;
  int64_t end = -1;
  size_t offset = 0;
  std::vector<int> users = {};            // streams; the first one allocated it
  StreamClock known = {};                 // the clock of the first, at `begin`
  std::vector<StreamMark> released = {};  // the users' work at `end`
};

struct Program {
  // A record or a wait, which a run must repeat at the same moment.
  struct Sync {
    int64_t moment = 0;
    int stream = 0;
    bool wait = false;
    bool operator==(const Sync&) const = default;
  };
  std::vector<Slot> slots;
  std::vector<Sync> syncs;
  int64_t moments = 0;
  size_t pool_bytes = 0;
};

// Places the slots in one pool. Two of them share memory only if the host gives back one before it
// asks for the other and, when other streams have used the first, an event says that they are done
// with it.
void place(Program& program);

// Sizes by class at the moment when most bytes are live.
MemoryReport::Program describe(const std::string& name, const Program& program);

}  // namespace sbtrain
