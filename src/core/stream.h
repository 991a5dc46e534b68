// An ordered queue of operations on one backend, with the memory that ops may take scratch from.
#pragma once

#include "core/memory.h"
#include "core/op_profile.h"

namespace sbtrain {

class Stream {
 public:
  explicit Stream(Memory& memory, void* handle = nullptr) : memory_(&memory), handle_(handle) {}

  Backend backend() const { return memory_->backend(); }
  bool planning() const { return backend() == Backend::kPlan; }
  Memory& memory() const { return *memory_; }
  void* handle() const { return handle_; }  // cudaStream_t on Backend::kCuda
  OpProfile* profile() const { return profile_; }
  void set_profile(OpProfile* profile) { profile_ = profile; }

  // Scratch for the duration of one op.
  Buffer scratch(std::string_view name, DType dtype, std::initializer_list<int64_t> shape) const {
    return memory_->allocate(MemoryClass::kScratch, name, dtype, shape);
  }

 private:
  Memory* memory_;
  void* handle_;
  OpProfile* profile_ = nullptr;
};

}  // namespace sbtrain
