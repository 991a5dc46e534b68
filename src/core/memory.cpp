#include "core/memory.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "core/device.h"
#include "core/error.h"
#include "core/memory_check.h"
#include "core/memory_plan.h"

namespace sbtrain {
namespace {

constexpr int64_t kPersistentIds = int64_t{1} << 40;  // ids below are slots of a program
constexpr int kCompute = 0;
constexpr uint8_t kPoison = 0xff;
constexpr size_t kLeastCollective = size_t{1} << 20;  // smaller weights are not worth a mapping
// Released memory of this size at most is kept for the next buffer of that size on a host as well:
// the small buffers of a step of decoding would cost a tenth of it in malloc() and page faults.
constexpr size_t kMostSpareOnHost = size_t{1} << 16;
constexpr const char* kTrainingAdvice =
    "Lower train.micro_batch or train.sequence_length, or set train.recompute: selective or full, "
    "or with it train.offload: activations.";

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
    std::vector<int> users;  // streams; the first allocated
    StreamMark allocated;
  };
  struct Spare {
    void* data;
    std::vector<StreamMark> released;
  };
  StreamOrder order;
  std::map<int64_t, Chunk> chunks;  // persistent buffers, and step buffers without a plan
  // Device memory that was given back, by size. Freeing it would stop the device each time.
  std::multimap<size_t, Spare> spare;
  int64_t next_id = kPersistentIds;
  std::array<size_t, kMemoryClasses> persistent{};

  std::map<std::string, Program, std::less<>> programs;
  Program* running = nullptr;
  std::string running_name;
  bool replaying = false;
  size_t next_slot = 0;
  size_t next_sync = 0;
  int64_t moments = 0;                // of this run of a planned program
  bool deviated = false;              // a buffer was released at another moment than planned
  int64_t live = 0;                   // buffers of the running program
  StreamMark begun;                   // the compute stream's work before the program
  std::vector<StreamMark> last_use;   // of each stream, in the last program
  std::vector<StreamMark> allocated;  // by slot of the running program
  void* pool = nullptr;
  size_t pool_bytes = 0;
  Allocator allocate_collective;
  struct Region {
    std::shared_ptr<void> data;
    size_t bytes;
  };
  std::vector<Region> collective;
  bool poison = false;

  bool recording(Backend backend) const {
    return running && !replaying && backend == Backend::kPlan;
  }
  std::vector<StreamMark> marks(const std::vector<int>& users) const {
    std::vector<StreamMark> now;
    now.reserve(users.size());
    for (const int user : users) now.push_back(order.now(user));
    return now;
  }
};

Memory::Memory(Backend backend, const Target& target)
    : backend_(backend), target_(target), impl_(std::make_unique<Impl>()) {
  impl_->order.stream(kComputeStream);
}

Memory::~Memory() {
  for (auto& [id, chunk] : impl_->chunks) give_back(chunk.data);
  release_spare();
  give_back(impl_->pool);
}

// ---- Allocation -------------------------------------------------------------------------------

Buffer Memory::allocate(MemoryClass c, std::string_view name, DType dtype,
                        std::initializer_list<int64_t> shape) {
  return allocate(c, name, dtype, std::span<const int64_t>(shape.begin(), shape.size()));
}

Buffer Memory::allocate(MemoryClass c, std::string_view name, DType dtype,
                        std::span<const int64_t> shape) {
  return allocate(kCompute, c, name, dtype, shape);
}

Buffer Memory::allocate(int stream, MemoryClass c, std::string_view name, DType dtype,
                        std::span<const int64_t> shape) {
  Impl& impl = *impl_;
  require_possible(name, dtype, shape);
  const Tensor tensor(nullptr, dtype, shape);
  if (!impl.running) return allocate_own(stream, c, name, tensor);
  if (stream != kCompute && !covers(impl.order.clock(stream), impl.begun)) {
    fail(ExitCode::kInternal,
         "stream '{}' allocates '{}' before an event of '{}' says that program '{}' has begun",
         impl.order.name(stream), name, kComputeStream, impl.running_name);
  }
  if (impl.replaying) return replay(stream, name, tensor);
  if (impl.recording(backend_)) return record_slot(stream, c, name, tensor);
  return allocate_own(stream, c, name, tensor);
}

// The last step of an allocation: a failure before it leaves no Buffer that would release anything.
Buffer Memory::owner(const Tensor& tensor, int64_t id) {
  Buffer buffer;
  buffer.tensor_ = tensor;
  buffer.memory_ = this;
  buffer.id_ = id;
  return buffer;
}

Buffer Memory::record_slot(int stream, MemoryClass c, std::string_view name, const Tensor& tensor) {
  Impl& impl = *impl_;
  Program& program = *impl.running;
  program.slots.push_back({.memory_class = c,
                           .name = std::string(name),
                           .bytes = tensor.bytes(),
                           .begin = program.moments++,
                           .users = {stream},
                           .known = impl.order.clock(stream)});
  impl.allocated.push_back(impl.order.now(stream));
  ++impl.live;
  return owner(tensor, static_cast<int64_t>(program.slots.size()) - 1);
}

Buffer Memory::replay(int stream, std::string_view name, Tensor tensor) {
  Impl& impl = *impl_;
  const std::vector<Slot>& slots = impl.running->slots;
  const size_t index = impl.next_slot;
  require(index < slots.size() && slots[index].bytes == tensor.bytes() &&
              slots[index].users.front() == stream,
          "program '{}' asks for '{}' ({} bytes) where its plan has '{}'", impl.running_name, name,
          tensor.bytes(), index < slots.size() ? slots[index].name : "nothing");
  require(!impl.deviated && slots[index].begin == impl.moments,
          "program '{}' holds other buffers than its plan does when it asks for '{}'",
          impl.running_name, name);
  if (impl.pool) {
    tensor.data = static_cast<std::byte*>(impl.pool) + slots[index].offset;
    if (impl.poison) check_poison(name, tensor.data, aligned(tensor.bytes()));
  }
  ++impl.moments;
  ++impl.next_slot;
  ++impl.live;
  impl.allocated.push_back(impl.order.now(stream));
  return owner(tensor, static_cast<int64_t>(index));
}

Buffer Memory::allocate_own(int stream, MemoryClass c, std::string_view name, Tensor tensor) {
  Impl& impl = *impl_;
  const size_t bytes = tensor.bytes();
  if (backend_ != Backend::kPlan) {
    tensor.data = take(bytes, stream, c == MemoryClass::kWeights && bytes >= kLeastCollective);
    if (!tensor.data) {
      fail(ExitCode::kOutOfMemory, "out of memory: '{}' needs {:.2f} GiB. {}", name,
           static_cast<double>(bytes) / (1 << 30), kTrainingAdvice);
    }
  }
  const int64_t id = impl.next_id++;
  impl.chunks[id] = {tensor.data, bytes, c, {stream}, impl.order.now(stream)};
  // Only now, so that the memory is freed when this throws.
  if (impl.poison && tensor.data) check_poison(name, tensor.data, aligned(bytes));
  if (!impl.running) impl.persistent[static_cast<int>(c)] += bytes;
  return owner(tensor, id);
}

// At least `bytes` bytes that the stream may use at once, or null.
void* Memory::take(size_t bytes, int stream, bool collective) {
  const StreamClock& clock = impl_->order.clock(stream);
  const auto [first, last] = impl_->spare.equal_range(aligned(bytes));
  const auto it = std::find_if(first, last, [&](const auto& entry) {
    return std::all_of(entry.second.released.begin(), entry.second.released.end(),
                       [&](const StreamMark& mark) { return covers(clock, mark); });
  });
  if (it != last) {
    void* data = it->second.data;
    impl_->spare.erase(it);
    return data;
  }
  void* data = obtain(aligned(bytes), collective);
  if (!data && !impl_->spare.empty()) {
    release_spare();
    data = obtain(aligned(bytes), collective);
  }
  if (data && impl_->poison) device_fill(backend_, data, kPoison, aligned(bytes));
  return data;
}

void* Memory::obtain(size_t bytes, bool collective) {
  Impl& impl = *impl_;
  if (!collective || !impl.allocate_collective) return device_allocate(backend_, bytes);
  std::shared_ptr<void> data = impl.allocate_collective(bytes);
  if (!data) return nullptr;
  return impl.collective.emplace_back(Impl::Region{std::move(data), bytes}).data.get();
}

void Memory::give_back(void* data) noexcept {
  std::vector<Impl::Region>& regions = impl_->collective;
  const auto region = std::ranges::find_if(
      regions, [&](const Impl::Region& each) { return each.data.get() == data; });
  if (region == regions.end()) return device_free(backend_, data);
  regions.erase(region);
}

void Memory::set_collective_allocator(Allocator allocate) {
  require(impl_->chunks.empty() && !impl_->pool,
          "the allocator of collective memory comes before anything is allocated");
  impl_->allocate_collective = std::move(allocate);
}

std::vector<Tensor> Memory::collective_regions() const {
  std::vector<Tensor> regions;
  for (const Impl::Region& region : impl_->collective) {
    regions.emplace_back(region.data.get(), DType::kU8,
                         std::vector<int64_t>{static_cast<int64_t>(region.bytes)});
  }
  return regions;
}

// ---- Release ----------------------------------------------------------------------------------

void Memory::release(int64_t id) noexcept {
  Impl& impl = *impl_;
  if (id < kPersistentIds) return release_slot(id);
  const auto it = impl.chunks.find(id);
  if (it == impl.chunks.end()) return;
  Impl::Chunk& chunk = it->second;
  if (impl.poison) device_fill(backend_, chunk.data, kPoison, aligned(chunk.bytes));
  if (backend_ == Backend::kCuda || impl.poison ||
      (backend_ == Backend::kCpu && chunk.bytes <= kMostSpareOnHost)) {
    impl.spare.emplace(aligned(chunk.bytes), Impl::Spare{chunk.data, impl.marks(chunk.users)});
  } else {
    give_back(chunk.data);
  }
  if (!impl.running) impl.persistent[static_cast<int>(chunk.memory_class)] -= chunk.bytes;
  impl.chunks.erase(it);
}

void Memory::release_slot(int64_t id) noexcept {
  Impl& impl = *impl_;
  --impl.live;
  if (!impl.running) return;
  Slot& slot = impl.running->slots[id];
  const std::vector<StreamMark> marks = impl.marks(slot.users);
  impl.last_use.insert(impl.last_use.end(), marks.begin(), marks.end());
  if (impl.poison && impl.pool) {
    device_fill(backend_, static_cast<std::byte*>(impl.pool) + slot.offset, kPoison,
                aligned(slot.bytes));
  }
  if (impl.replaying) {
    if (slot.end != impl.moments++) impl.deviated = true;
  } else {
    slot.end = impl.running->moments++;
    slot.released = marks;
  }
}

void Memory::release_spare() noexcept {
  for (auto& [bytes, spare] : impl_->spare) give_back(spare.data);
  impl_->spare.clear();
}

void Memory::poison() {
  require(impl_->chunks.empty() && !impl_->pool,
          "poison() must be called before anything is allocated");
  impl_->poison = true;
}

void Memory::check_poison(std::string_view name, const void* data, size_t bytes) const {
  if (backend_ != Backend::kCpu) return;
  const auto* byte = static_cast<const uint8_t*>(data);
  // Every byte is the poison if the first one is, and each of the others what the one before it is:
  // the library compares many at a time, and tests with small buffers spend much of their time
  // here.
  const bool whole =
      bytes == 0 || (*byte == kPoison && std::memcmp(byte, byte + 1, bytes - 1) == 0);
  require(whole, "the memory that '{}' is given was written after its release", name);
}

// ---- Streams ----------------------------------------------------------------------------------

int Memory::stream(std::string_view name) {
  return impl_->order.stream(name);
}

void Memory::use(const Buffer& buffer, int stream) {
  Impl& impl = *impl_;
  require(buffer.memory_ == this, "stream '{}' uses a buffer of another memory",
          impl.order.name(stream));
  const bool slot = buffer.id_ < kPersistentIds;
  std::vector<int>& users =
      slot ? impl.running->slots.at(buffer.id_).users : impl.chunks.at(buffer.id_).users;
  const StreamMark& allocated =
      slot ? impl.allocated.at(buffer.id_) : impl.chunks.at(buffer.id_).allocated;
  if (!covers(impl.order.clock(stream), allocated)) {
    fail(ExitCode::kInternal,
         "stream '{}' uses a buffer of stream '{}' without an event after its allocation",
         impl.order.name(stream), impl.order.name(allocated.stream));
  }
  if (std::find(users.begin(), users.end(), stream) != users.end()) return;
  require(!slot || !impl.replaying,
          "program '{}': stream '{}' uses a buffer that its plan keeps "
          "from it",
          impl.running_name, impl.order.name(stream));
  users.push_back(stream);
}

StreamClock Memory::record(int stream) {
  synchronized(stream, /*wait=*/false);
  return impl_->order.record(stream);
}

void Memory::wait(int stream, const StreamClock& event) {
  synchronized(stream, /*wait=*/true);
  impl_->order.wait(stream, event);
}

void Memory::synchronized(int stream, bool wait) {
  Impl& impl = *impl_;
  if (impl.recording(backend_)) {
    impl.running->syncs.push_back({impl.running->moments++, stream, wait});
  } else if (impl.running && impl.replaying) {
    const std::vector<Program::Sync>& syncs = impl.running->syncs;
    const Program::Sync now{impl.moments++, stream, wait};
    require(impl.next_sync < syncs.size() && syncs[impl.next_sync] == now,
            "program '{}' orders its streams differently from its plan", impl.running_name);
    ++impl.next_sync;
  }
}

// ---- Programs ---------------------------------------------------------------------------------

void Memory::begin(std::string_view name) {
  Impl& impl = *impl_;
  require(!impl.running, "program '{}' begins inside '{}'", name, impl.running_name);
  for (const StreamMark& mark : impl.last_use) {
    if (covers(impl.order.clock(kCompute), mark)) continue;
    fail(ExitCode::kInternal,
         "program '{}' begins before '{}' waits for what stream '{}' does with memory of '{}'",
         name, kComputeStream, impl.order.name(mark.stream), impl.running_name);
  }
  auto it = impl.programs.find(name);
  impl.replaying = it != impl.programs.end() && it->second.pool_bytes > 0;
  if (it == impl.programs.end()) it = impl.programs.emplace(name, Program{}).first;
  impl.running = &it->second;
  impl.running_name = name;
  impl.next_slot = 0;
  impl.next_sync = 0;
  impl.moments = 0;
  impl.deviated = false;
  impl.live = 0;
  impl.begun = impl.order.now(kCompute);
  impl.last_use.clear();
  impl.allocated.clear();
}

void Memory::end() {
  Impl& impl = *impl_;
  Program* program = impl.running;
  impl.running = nullptr;
  if (!program || impl.replaying) return;
  for (Slot& slot : program->slots) {
    if (slot.end < 0) slot.end = program->moments;
  }
  place(*program);
}

void Memory::adopt_plan(const Memory& plan) {
  Impl& impl = *impl_;
  require(!impl.running && !impl.pool, "a plan is adopted once, outside a program");
  impl.programs = plan.impl_->programs;
  for (int stream = 0; stream < plan.impl_->order.streams(); ++stream) {
    require(impl.order.stream(plan.impl_->order.name(stream)) == stream,
            "the plan's streams were made in another order");
  }
  for (const auto& [name, program] : impl.programs) {
    impl.pool_bytes = std::max(impl.pool_bytes, program.pool_bytes);
  }
  if (backend_ == Backend::kPlan) return;
  require_memory(backend_, plan.report(), "the run", kTrainingAdvice);
  impl.pool = take(impl.pool_bytes, kCompute, /*collective=*/true);
  if (!impl.pool) {
    fail(ExitCode::kOutOfMemory, "out of memory: the step's activations need {:.2f} GiB. {}",
         static_cast<double>(impl.pool_bytes) / (1 << 30), kTrainingAdvice);
  }
}

MemoryReport Memory::report() const {
  MemoryReport report;
  report.persistent = impl_->persistent;
  for (const auto& [name, program] : impl_->programs) {
    report.programs.push_back(describe(name, program));
    report.pool_bytes = std::max(report.pool_bytes, program.pool_bytes);
  }
  return report;
}

}  // namespace sbtrain
