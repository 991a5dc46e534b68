#include "core/memory_plan.h"

#include <algorithm>
#include <iterator>

namespace sbtrain {
namespace {

bool may_share(const Slot& a, const Slot& b) {
  const Slot& first = a.begin < b.begin ? a : b;
  const Slot& second = a.begin < b.begin ? b : a;
  return first.end < second.begin &&
         std::all_of(first.released.begin(), first.released.end(),
                     [&](const StreamMark& mark) { return covers(second.known, mark); });
}

// The stream of a slot that no other stream uses; -1 for other slots.
int only_stream(const Slot& slot) {
  return slot.users.size() == 1 ? slot.users.front() : -1;
}

// Slots that lie one after the other in the pool, and what can be said of all of them at once.
struct Block {
  std::vector<const Slot*> slots;                                        // by offset
  int64_t first_begin = 0, last_begin = 0, first_end = 0, last_end = 0;  // moments
  int stream = -1;         // the only one that uses any of them; -1 if there are several
  size_t end_offset = 0;   // the largest
  size_t largest_gap = 0;  // between slots, while all of them are live

  void summarize() {
    const Slot& first = *slots.front();
    first_begin = last_begin = first.begin;
    first_end = last_end = first.end;
    stream = only_stream(first);
    end_offset = first.offset;
    largest_gap = 0;
    for (const Slot* slot : slots) {
      first_begin = std::min(first_begin, slot->begin);
      last_begin = std::max(last_begin, slot->begin);
      first_end = std::min(first_end, slot->end);
      last_end = std::max(last_end, slot->end);
      if (only_stream(*slot) != stream) stream = -1;
      if (slot->offset > end_offset) largest_gap = std::max(largest_gap, slot->offset - end_offset);
      end_offset = std::max(end_offset, slot->offset + aligned(slot->bytes));
    }
  }
  // Whether all slots of the block share memory with `slot`. Work of one stream is in order, so
  // that only the moments count there.
  bool all_share(const Slot& slot) const {
    return stream >= 0 && stream == only_stream(slot) &&
           (last_end < slot.begin || slot.end < first_begin);
  }
  // Whether none of them does, since all are live at some moment of the slot's life.
  bool none_shares(const Slot& slot) const {
    return last_begin <= slot.end && slot.begin <= first_end;
  }
};

// The slots that have their place. A model of thousands of layers has a hundred thousand slots, and
// a block of them is looked at as a whole wherever that is enough.
class Placed {
 public:
  // The lowest offset at which `slot` overlaps with no slot that must not share its memory.
  size_t lowest_offset(const Slot& slot) const {
    const size_t bytes = aligned(slot.bytes);
    size_t offset = 0;
    for (const Block& block : blocks_) {
      if (block.all_share(slot)) continue;
      if (block.none_shares(slot) && block.largest_gap < bytes) {
        if (offset + bytes <= block.slots.front()->offset) return offset;
        offset = std::max(offset, block.end_offset);
        continue;
      }
      for (const Slot* other : block.slots) {
        if (may_share(*other, slot)) continue;
        if (offset + bytes <= other->offset) return offset;
        offset = std::max(offset, other->offset + aligned(other->bytes));
      }
    }
    return offset;
  }

  void add(const Slot& slot) {
    const auto before = [](size_t offset, const Slot* other) { return offset < other->offset; };
    auto block = std::upper_bound(
        blocks_.begin(), blocks_.end(), slot.offset,
        [&](size_t offset, const Block& b) { return before(offset, b.slots.front()); });
    if (block != blocks_.begin()) --block;
    if (block == blocks_.end()) block = blocks_.emplace(blocks_.end());
    std::vector<const Slot*>& slots = block->slots;
    slots.insert(std::upper_bound(slots.begin(), slots.end(), slot.offset, before), &slot);
    if (slots.size() > kLargestBlock) {
      const auto middle = slots.begin() + kLargestBlock / 2;
      Block second;
      second.slots.assign(middle, slots.end());
      slots.erase(middle, slots.end());
      second.summarize();
      block = std::prev(blocks_.insert(std::next(block), std::move(second)));
    }
    block->summarize();
  }

 private:
  static constexpr size_t kLargestBlock = 128;
  std::vector<Block> blocks_;  // by the offset of their first slots
};

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
  Placed placed;
  for (const size_t index : order) {
    Slot& slot = program.slots[index];
    slot.offset = placed.lowest_offset(slot);
    program.pool_bytes = std::max(program.pool_bytes, slot.offset + aligned(slot.bytes));
    placed.add(slot);
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
