// Device memory, planned before it is allocated.
//
// A training run asks for memory in two ways: persistent buffers (weights, gradients, optimizer
// state) and step buffers, whose sequence of allocations and releases is the same in every
// micro-batch. A step is a *program*: the first time it runs against Backend::kPlan, where
// every op is a no-op and no byte exists, and Memory records sizes and lifetimes. From that
// record come the printed plan (`sbtrain train --dry-run`) and the offsets in one pool that
// later runs of the same program use again. So the plan is the schedule itself, not a copy of it.
//
// Several streams of a device share one Memory. A buffer belongs to the stream that it was
// allocated for. Another stream that uses the buffer says so (Stream::use), after an event has
// told it that the buffer is there. These streams may still work on a buffer when it is released:
// its memory goes to another stream only once that one waits for events recorded on them after the
// release. In a program the compute stream comes first and last: other streams wait for an event of
// it before they allocate, and it waits for theirs before the next program begins.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/backend.h"
#include "core/stream_order.h"
#include "core/target.h"
#include "core/tensor.h"

namespace sbtrain {

enum class MemoryClass : uint8_t {
  kWeights,      // compute copies and master weights
  kGradients,    // accumulated gradients
  kOptimizer,    // its state, averages of weights, matrices on their way
  kActivations,  // what blocks save for the backward pass, and the residual stream
  kAttention,    // what attention modules save
  kLogits,       // chunks of logits in the loss
  kScratch,      // lives within one op
  kInputs,       // tokens, targets, positions, document boundaries
};
inline constexpr int kMemoryClasses = 8;

// The stream that buffers belong to unless another is named.
inline constexpr const char* kComputeStream = "compute";
const char* memory_class_name(MemoryClass c);

class Memory;

// Owner of one allocation; gives it back when destroyed. Move-only.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept;
  ~Buffer() { release(); }
  void release();
  const Tensor& tensor() const { return tensor_; }
  operator const Tensor&() const { return tensor_; }  // NOLINT: a buffer is used as its tensor

 private:
  friend class Memory;
  Tensor tensor_;
  Memory* memory_ = nullptr;
  int64_t id_ = -1;
};

struct MemoryReport {
  struct Program {
    std::string name;
    size_t pool_bytes = 0;                         // size of the pool that this program needs
    size_t peak_bytes = 0;                         // largest sum of live buffers
    std::array<size_t, kMemoryClasses> at_peak{};  // by class, at that moment
  };
  std::array<size_t, kMemoryClasses> persistent{};
  std::vector<Program> programs;
  size_t pool_bytes = 0;  // one pool serves all programs: the largest of them
  size_t total_bytes() const;
};

class Memory {
 public:
  explicit Memory(Backend backend) : Memory(backend, present_target(backend)) {}
  // Plans a run on `target`; needs neither the device nor the memory.
  static Memory planning(const Target& target) { return Memory(Backend::kPlan, target); }
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  Backend backend() const { return backend_; }
  // The machine that runs the ops, or that Backend::kPlan plans for.
  const Target& target() const { return target_; }
  // The type of activations and compute weights: bf16 on (or planned for) a GPU, else f32.
  DType compute_dtype() const {
    return target_.backend == Backend::kCuda ? DType::kBF16 : DType::kF32;
  }

  // Inside a program this is a step buffer, outside a persistent one. Its contents are undefined.
  // `name` appears in reports and errors. Throws ExitCode::kOutOfMemory with settings to change.
  Buffer allocate(MemoryClass c, std::string_view name, DType dtype,
                  std::initializer_list<int64_t> shape);
  Buffer allocate(MemoryClass c, std::string_view name, DType dtype,
                  std::span<const int64_t> shape);
  // The same for the stream with the index that stream() returned.
  Buffer allocate(int stream, MemoryClass c, std::string_view name, DType dtype,
                  std::span<const int64_t> shape);

  // Called by streams (core/stream.h). They throw ExitCode::kInternal for a use that no event
  // orders after the allocation, and when a planned program records or waits at other moments than
  // its plan.
  int stream(std::string_view name);
  void use(const Buffer& buffer, int stream);
  StreamClock record(int stream);
  void wait(int stream, const StreamClock& event);

  // begin() starts a run of program `name`, end() ends it. Buffers of a program must be released
  // before it ends. With a plan (see adopt_plan) the allocations must follow the recorded sequence;
  // without one each buffer gets its own memory, as in tests and generation.
  void begin(std::string_view name);
  void end();

  // From now on the pool and persistent weights of at least 1 MiB are memory of `allocate`, which
  // returns null if there is none: memory that other ranks reach directly. To be called before
  // anything is allocated; the returned handles live until the memory is freed.
  using Allocator = std::function<std::shared_ptr<void>(size_t bytes)>;
  void set_collective_allocator(Allocator allocate);
  // What came from it, in the order of the allocations.
  std::vector<Tensor> collective_regions() const;

  // Takes over the programs that `plan` (of Backend::kPlan) has recorded, and allocates their pool.
  // Throws ExitCode::kOutOfMemory if all of `plan`, with the buffers it holds now, does not fit.
  void adopt_plan(const Memory& plan);

  MemoryReport report() const;

  // For tests, called before anything is allocated. Every byte that no buffer holds is set to 0xff,
  // which makes NaN in every floating-point type and so exposes reads of memory that was released
  // or never written. On the CPU it exposes writes to released memory too: the allocate() that is
  // given this memory throws. Slow.
  void poison();

 private:
  friend class Buffer;
  struct Impl;
  Memory(Backend backend, const Target& target);
  Buffer owner(const Tensor& tensor, int64_t id);
  Buffer record_slot(int stream, MemoryClass c, std::string_view name, const Tensor& tensor);
  Buffer replay(int stream, std::string_view name, Tensor tensor);
  Buffer allocate_own(int stream, MemoryClass c, std::string_view name, Tensor tensor);
  void synchronized(int stream, bool wait);
  void release(int64_t id) noexcept;
  void release_slot(int64_t id) noexcept;
  void release_spare() noexcept;
  void* take(size_t bytes, int stream, bool collective = false);
  void* obtain(size_t bytes, bool collective);
  void give_back(void* data) noexcept;
  void check_poison(std::string_view name, const void* data, size_t bytes) const;
  Backend backend_;
  Target target_;
  std::unique_ptr<Impl> impl_;
};

// Runs one program for the scope's duration.
class ProgramScope {
 public:
  ProgramScope(Memory& memory, std::string_view name) : memory_(memory) { memory_.begin(name); }
  ~ProgramScope() { memory_.end(); }
  ProgramScope(const ProgramScope&) = delete;
  ProgramScope& operator=(const ProgramScope&) = delete;

 private:
  Memory& memory_;
};

}  // namespace sbtrain
