#include "core/memory.h"

#include <algorithm>
#include <map>

#include "core/device.h"
#include "core/error.h"

namespace sbtrain {
namespace {

constexpr size_t kAlignment = 256;
constexpr int64_t kPersistentIds = int64_t{1} << 40;  // ids below are slots of a program

size_t aligned(size_t bytes) {
  return (std::max<size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
}

// One allocation of a program: live from event `begin` until event `end`.
struct Slot {
  MemoryClass memory_class;
  std::string name;
  size_t bytes;
  int64_t begin;
  int64_t end = -1;
  size_t offset = 0;
};

struct Program {
  std::vector<Slot> slots;
  int64_t events = 0;
  size_t pool_bytes = 0;
};

// Places the slots in one pool: larger first, each at the lowest offset that is free for its
// whole life.
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
      if (other->begin < slot.end && slot.begin < other->end) {
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

}  // namespace

const char* memory_class_name(MemoryClass c) {
  static constexpr const char* kNames[kMemoryClasses] = {"weights",     "gradients", "optimizer",
                                                         "activations", "attention", "logits",
                                                         "scratch",     "inputs"};
  return kNames[static_cast<int>(c)];
}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this != &other) {
    release();
    tensor_ = other.tensor_;
    memory_ = other.memory_;
    id_ = other.id_;
    other.tensor_ = Tensor();
    other.memory_ = nullptr;
    other.id_ = -1;
  }
  return *this;
}

void Buffer::release() {
  if (memory_) memory_->release(id_);
  memory_ = nullptr;
  tensor_ = Tensor();
}

size_t MemoryReport::total_bytes() const {
  size_t total = pool_bytes;
  for (const size_t bytes : persistent) total += bytes;
  return total;
}

struct Memory::Impl {
  struct Chunk {
    void* data;
    size_t bytes;
    MemoryClass memory_class;
  };
  std::map<int64_t, Chunk> chunks;  // persistent buffers, and step buffers without a plan
  // Device memory given back, by size. Freeing it would stop the device each time; to use it again
  // is safe because one stream orders everything that runs.
  std::multimap<size_t, void*> spare;
  int64_t next_id = kPersistentIds;
  std::array<size_t, kMemoryClasses> persistent{};

  std::map<std::string, Program, std::less<>> programs;
  Program* running = nullptr;
  std::string running_name;
  bool replaying = false;
  size_t next_slot = 0;
  int64_t events = 0;     // allocations and releases of this run of a planned program
  bool deviated = false;  // a buffer was released at another moment than planned
  int64_t live = 0;       // buffers of the running program
  void* pool = nullptr;
  size_t pool_bytes = 0;
};

Memory::Memory(Backend backend, const Target& target)
    : backend_(backend), target_(target), impl_(std::make_unique<Impl>()) {}

Memory::~Memory() {
  for (auto& [id, chunk] : impl_->chunks) device_free(backend_, chunk.data);
  release_spare();
  device_free(backend_, impl_->pool);
}

void Memory::release_spare() noexcept {
  for (auto& [bytes, data] : impl_->spare) device_free(backend_, data);
  impl_->spare.clear();
}

// Memory of at least `bytes`, or null.
void* Memory::take(size_t bytes) {
  const auto it = impl_->spare.find(aligned(bytes));
  if (it != impl_->spare.end()) {
    void* data = it->second;
    impl_->spare.erase(it);
    return data;
  }
  void* data = device_allocate(backend_, bytes);
  if (data || impl_->spare.empty()) return data;
  release_spare();
  return device_allocate(backend_, bytes);
}

Buffer Memory::allocate(MemoryClass c, std::string_view name, DType dtype,
                        std::initializer_list<int64_t> shape) {
  return allocate(c, name, dtype, std::span<const int64_t>(shape.begin(), shape.size()));
}

Buffer Memory::allocate(MemoryClass c, std::string_view name, DType dtype,
                        std::span<const int64_t> shape) {
  Buffer buffer;
  buffer.tensor_ = Tensor(nullptr, dtype, shape);
  const auto give = [&](int64_t id) {  // only now, so that a failure releases nothing
    buffer.memory_ = this;
    buffer.id_ = id;
  };
  const size_t bytes = buffer.tensor_.bytes();
  Impl& impl = *impl_;
  if (impl.running && backend_ == Backend::kPlan && !impl.replaying) {
    give(static_cast<int64_t>(impl.running->slots.size()));
    impl.running->slots.push_back({c, std::string(name), bytes, impl.running->events++});
    ++impl.live;
    return buffer;
  }
  if (impl.running && impl.replaying) {
    const std::vector<Slot>& slots = impl.running->slots;
    require(impl.next_slot < slots.size() && slots[impl.next_slot].bytes == bytes,
            "program '{}' asks for '{}' ({} bytes) where its plan has '{}'", impl.running_name,
            name, bytes, impl.next_slot < slots.size() ? slots[impl.next_slot].name : "nothing");
    require(!impl.deviated && slots[impl.next_slot].begin == impl.events,
            "program '{}' holds other buffers than its plan does when it asks for '{}'",
            impl.running_name, name);
    ++impl.events;
    give(static_cast<int64_t>(impl.next_slot));
    if (impl.pool) {
      buffer.tensor_.data = static_cast<std::byte*>(impl.pool) + slots[impl.next_slot].offset;
    }
    ++impl.next_slot;
    ++impl.live;
    return buffer;
  }
  void* data = nullptr;
  if (backend_ != Backend::kPlan) {
    data = take(bytes);
    if (!data) {
      fail(ExitCode::kOutOfMemory,
           "out of memory: '{}' needs {:.2f} GiB. Lower train.micro_batch or "
           "train.sequence_length, or set train.recompute: full.",
           name, static_cast<double>(bytes) / (1 << 30));
    }
  }
  give(impl.next_id++);
  buffer.tensor_.data = data;
  impl.chunks[buffer.id_] = {data, bytes, c};
  if (!impl.running) impl.persistent[static_cast<int>(c)] += bytes;
  return buffer;
}

void Memory::release(int64_t id) noexcept {
  Impl& impl = *impl_;
  if (id >= kPersistentIds) {
    const auto it = impl.chunks.find(id);
    if (it == impl.chunks.end()) return;
    if (backend_ == Backend::kCuda) {
      impl.spare.emplace(aligned(it->second.bytes), it->second.data);
    } else {
      device_free(backend_, it->second.data);
    }
    if (!impl.running)
      impl.persistent[static_cast<int>(it->second.memory_class)] -= it->second.bytes;
    impl.chunks.erase(it);
    return;
  }
  --impl.live;
  if (!impl.running) return;
  if (impl.replaying) {
    if (impl.running->slots[id].end != impl.events++) impl.deviated = true;
  } else {
    impl.running->slots[id].end = impl.running->events++;
  }
}

void Memory::begin(std::string_view name) {
  Impl& impl = *impl_;
  require(!impl.running, "program '{}' begins inside '{}'", name, impl.running_name);
  auto it = impl.programs.find(name);
  impl.replaying = it != impl.programs.end() && it->second.pool_bytes > 0;
  if (it == impl.programs.end()) it = impl.programs.emplace(name, Program{}).first;
  impl.running = &it->second;
  impl.running_name = name;
  impl.next_slot = 0;
  impl.events = 0;
  impl.deviated = false;
  impl.live = 0;
}

void Memory::end() {
  Impl& impl = *impl_;
  Program* program = impl.running;
  impl.running = nullptr;
  if (!program || impl.replaying) return;
  for (Slot& slot : program->slots) {
    if (slot.end < 0) slot.end = program->events;
  }
  place(*program);
}

void Memory::adopt_plan(const Memory& plan) {
  Impl& impl = *impl_;
  require(!impl.running && !impl.pool, "a plan is adopted once, outside a program");
  impl.programs = plan.impl_->programs;
  for (const auto& [name, program] : impl.programs) {
    impl.pool_bytes = std::max(impl.pool_bytes, program.pool_bytes);
  }
  if (backend_ == Backend::kPlan) return;
  impl.pool = take(impl.pool_bytes);
  if (!impl.pool) {
    fail(ExitCode::kOutOfMemory,
         "out of memory: the step's activations need {:.2f} GiB. Lower train.micro_batch or "
         "train.sequence_length, or set train.recompute: full.",
         static_cast<double>(impl.pool_bytes) / (1 << 30));
  }
}

MemoryReport Memory::report() const {
  MemoryReport report;
  report.persistent = impl_->persistent;
  for (const auto& [name, program] : impl_->programs) {
    MemoryReport::Program out;
    out.name = name;
    out.pool_bytes = program.pool_bytes;
    std::vector<std::pair<int64_t, const Slot*>> events;
    for (const Slot& slot : program.slots) {
      events.emplace_back(slot.begin, &slot);
      events.emplace_back(slot.end, &slot);
    }
    std::sort(events.begin(), events.end(),
              [](const auto& a, const auto& b) { return a.first < b.first; });
    std::array<size_t, kMemoryClasses> live{};
    size_t total = 0;
    for (const auto& [time, slot] : events) {
      size_t& of_class = live[static_cast<int>(slot->memory_class)];
      if (time == slot->begin) {
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
    report.pool_bytes = std::max(report.pool_bytes, program.pool_bytes);
    report.programs.push_back(std::move(out));
  }
  return report;
}

}  // namespace sbtrain
