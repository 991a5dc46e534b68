#include "core/memory_plan.h"

#include <algorithm>

namespace sbtrain {
namespace {

bool may_share(const Slot& a, const Slot& b) {
  const Slot& first = a.begin < b.begin ? a : b;
  const Slot& second = a.begin < b.begin ? b : a;
  return first.end < second.begin &&
         std::all_of(first.released.begin(), first.released.end(),
                     [&](const StreamMark& mark) { return covers(second.known, mark); });
}

}  // namespace

size_t aligned(size_t bytes) {
  return (std::max<size_t>(bytes, 1) + kMemoryAlignment - 1) / kMemoryAlignment * kMemoryAlignment;
}

// Larger slots are placed first, each at the lowest offset that is free for its whole life.
void place(Program& program) {
  std::vector<size_t> order(program.slots.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return program.slots[a].bytes > program.slots[b].bytes;
  });
  std::vector<const Slot*> placed;
  for (const size_t index : order) {
    Slot& slot = program.slots[index];
    std::vector<std::pair<size_t, size_t>> busy;  // offset, end
    for (const Slot* other : placed) {
      if (!may_share(*other, slot)) {
        busy.emplace_back(other->offset, other->offset + aligned(other->bytes));
      }
    }
    std::sort(busy.begin(), busy.end());
    size_t offset = 0;
    for (const auto& [begin, end] : busy) {
      if (offset + aligned(slot.bytes) <= begin) break;
      offset = std::max(offset, end);
    }
    slot.offset = offset;
    program.pool_bytes = std::max(program.pool_bytes, offset + aligned(slot.bytes));
    placed.push_back(&slot);
  }
}

MemoryReport::Program describe(const std::string& name, const Program& program) {
  MemoryReport::Program out;
  out.name = name;
  out.pool_bytes = program.pool_bytes;
  std::vector<std::pair<int64_t, const Slot*>> moments;
  for (const Slot& slot : program.slots) {
    moments.emplace_back(slot.begin, &slot);
    moments.emplace_back(slot.end, &slot);
  }
  std::sort(moments.begin(), moments.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  std::array<size_t, kMemoryClasses> live{};
  size_t total = 0;
  for (const auto& [moment, slot] : moments) {
    size_t& of_class = live[static_cast<int>(slot->memory_class)];
    if (moment == slot->begin) {
      of_class += slot->bytes;
      total += slot->bytes;
      if (total > out.peak_bytes) {
        out.peak_bytes = total;
        out.at_peak = live;
      }
    } else {
      of_class -= slot->bytes;
      total -= slot->bytes;
    }
  }
  return out;
}

}  // namespace sbtrain
