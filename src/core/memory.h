// Device memory, planned before it is allocated.
//
// A training run asks for memory in two ways: persistent buffers (weights, gradients, optimizer
// state) and step buffers, whose sequence of allocations and releases is the same in every
// micro-batch. A step is a *program*: the first time it runs against Backend::kPlan, where
// every op is a no-op and no byte exists, and Memory records sizes and lifetimes. From that
// record come the printed plan (`sbtrain train --dry-run`) and the offsets in one pool that
// later runs of the same program replay. So the plan is the schedule itself, not a copy of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/backend.h"
#include "core/target.h"
#include "core/tensor.h"

namespace sbtrain {

enum class MemoryClass : uint8_t {
  kWeights,      // compute copies and master weights
  kGradients,    // accumulated gradients
  kOptimizer,    // AdamW moments
  kActivations,  // what blocks save for the backward pass, and the residual stream
  kAttention,    // what attention modules save
  kLogits,       // chunks of logits in the loss
  kScratch,      // lives within one op
  kInputs,       // tokens, targets, positions, document boundaries
};
inline constexpr int kMemoryClasses = 8;
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
  // The plan of a run on `target`; needs neither the device nor the memory.
  static Memory planning(const Target& target) { return Memory(Backend::kPlan, target); }
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  Backend backend() const { return backend_; }
  // What runs, or what Backend::kPlan plans for.
  const Target& target() const { return target_; }
  // The type of activations and compute weights: bf16 on (or planned for) a GPU, else f32.
  DType compute_dtype() const {
    return target_.backend == Backend::kCuda ? DType::kBF16 : DType::kF32;
  }

  // Inside a program: a step buffer. Outside: a persistent one. Contents are undefined.
  // `name` appears in reports and errors. Throws ExitCode::kOutOfMemory with the plan.
  Buffer allocate(MemoryClass c, std::string_view name, DType dtype,
                  std::initializer_list<int64_t> shape);
  Buffer allocate(MemoryClass c, std::string_view name, DType dtype,
                  std::span<const int64_t> shape);

  // Starts / ends a run of program `name`. Buffers of a program must be gone when it ends.
  // With a plan (see adopt_plan) the allocations must follow the recorded sequence; without one
  // each buffer gets its own memory, which is what tests and generation use.
  void begin(std::string_view name);
  void end();

  // Takes over the programs recorded by `plan` (a Memory of Backend::kPlan) and allocates their
  // pool once.
  void adopt_plan(const Memory& plan);

  MemoryReport report() const;

 private:
  friend class Buffer;
  struct Impl;
  Memory(Backend backend, const Target& target);
  void release(int64_t id) noexcept;
  void release_spare() noexcept;
  void* take(size_t bytes);
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
