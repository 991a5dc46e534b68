// An ordered queue of operations on one backend, with the memory that ops may take scratch from.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "core/memory.h"
#include "core/op_profile.h"

namespace sbtrain {

// What the ops of a backend keep for a stream: queues, library handles, tuned algorithms. Made by
// them when they first run on it.
class BackendContext {
 public:
  BackendContext() = default;
  BackendContext(const BackendContext&) = delete;
  BackendContext& operator=(const BackendContext&) = delete;
  virtual ~BackendContext() = default;
};

class Stream {
 public:
  explicit Stream(Memory& memory) : memory_(&memory) {}

  Backend backend() const { return memory_->backend(); }
  // What runs, or what Backend::kPlan plans for.
  const Target& target() const { return memory_->target(); }
  bool planning() const { return backend() == Backend::kPlan; }
  Memory& memory() const { return *memory_; }
  OpProfile* profile() const { return profile_; }
  void set_profile(OpProfile* profile) { profile_ = profile; }

  // While set, ops may time alternatives and keep the fastest: what they write is then undefined.
  bool tuning() const { return tuning_; }
  void set_tuning(bool on) { tuning_ = on; }

  // While set, ops give the same bits on every run, even where any order of summation is faster.
  bool deterministic() const { return deterministic_; }
  void set_deterministic(bool on) { deterministic_ = on; }

  // The implementation that ops with several must take (ops/choose.h has the names); empty: the one
  // that suits the problem. For tests and benchmarks.
  const std::string& implementation() const { return implementation_; }
  void set_implementation(std::string name) { implementation_ = std::move(name); }

  BackendContext* context() const { return context_.get(); }
  void set_context(std::unique_ptr<BackendContext> context) { context_ = std::move(context); }

  // Scratch for the duration of one op.
  Buffer scratch(std::string_view name, DType dtype, std::initializer_list<int64_t> shape) const {
    return memory_->allocate(MemoryClass::kScratch, name, dtype, shape);
  }

 private:
  Memory* memory_;
  OpProfile* profile_ = nullptr;
  bool tuning_ = false;
  bool deterministic_ = true;
  std::string implementation_;
  std::unique_ptr<BackendContext> context_;
};

}  // namespace sbtrain
