// An ordered queue of operations on one backend, with the memory that ops may take scratch from.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "core/event.h"
#include "core/memory.h"
#include "core/op_profile.h"
#include "core/precision.h"

struct CUstream_st;

namespace sbtrain {

// What the ops of a backend keep for a stream: library handles, tuned algorithms. They make it when
// the first of them runs on the stream.
class BackendContext {
 public:
  BackendContext() = default;
  BackendContext(const BackendContext&) = delete;
  BackendContext& operator=(const BackendContext&) = delete;
  virtual ~BackendContext() = default;
};

// A device runs the work of streams of high priority before that of the others.
enum class StreamPriority : uint8_t { kNormal, kHigh };

// A stream does its work in the order in which it was given. Streams of one Memory, which differ in
// name, run at the same time: one that needs what another has made waits for an event. A stream for
// communication has high priority.
class Stream {
 public:
  explicit Stream(Memory& memory, std::string_view name = kComputeStream,
                  StreamPriority priority = StreamPriority::kNormal);

  // `event` then stands for all that the stream was given until now.
  void record(Event& event);
  // What the stream is given from now on runs after the event.
  void wait(const Event& event);

  Backend backend() const { return memory_->backend(); }
  // The machine that runs the ops, or that Backend::kPlan plans for.
  const Target& target() const { return memory_->target(); }
  bool planning() const { return backend() == Backend::kPlan; }
  Memory& memory() const { return *memory_; }
  OpProfile* profile() const { return profile_; }
  void set_profile(OpProfile* profile) { profile_ = profile; }

  // While set, ops may time alternatives and keep the fastest; their outputs are undefined.
  bool tuning() const { return tuning_; }
  void set_tuning(bool on) { tuning_ = on; }

  // While set, ops give the same bits on every run, even where a free order of summation is faster.
  bool deterministic() const { return deterministic_; }
  void set_deterministic(bool on) { deterministic_ = on; }

  // What linear layers of blocks multiply in (core/precision.h).
  Precision precision() const { return precision_; }
  void set_precision(Precision precision) { precision_ = precision; }

  // The implementation that ops with several must use (ops/choose.h has the names); empty: the one
  // that suits the problem. For tests and benchmarks.
  const std::string& implementation() const { return implementation_; }
  void set_implementation(std::string name) { implementation_ = std::move(name); }

  BackendContext* context() const { return context_.get(); }
  void set_context(std::unique_ptr<BackendContext> context) { context_ = std::move(context); }

  // Memory::allocate for this stream.
  Buffer allocate(MemoryClass c, std::string_view name, DType dtype,
                  std::initializer_list<int64_t> shape) const {
    return memory_->allocate(id_, c, name, dtype, {shape.begin(), shape.size()});
  }
  // Scratch for the duration of one op.
  Buffer scratch(std::string_view name, DType dtype, std::initializer_list<int64_t> shape) const {
    return allocate(MemoryClass::kScratch, name, dtype, shape);
  }
  // Says that this stream works on a buffer that was allocated for another, until its release.
  // Throws ExitCode::kInternal when no event has told this stream that the buffer is there.
  void use(const Buffer& buffer) const { memory_->use(buffer, id_); }

  // Copies within the device; `to` and `from` may be the same.
  void copy_bytes(void* to, const void* from, size_t bytes);

  // The cudaStream_t, made at the first call. Throws ExitCode::kInternal on other backends.
  CUstream_st* queue();

 private:
  struct QueueDeleter {
    void operator()(CUstream_st* queue) const;
  };
  Memory* memory_;
  int id_;
  StreamPriority priority_;
  std::unique_ptr<CUstream_st, QueueDeleter> queue_;  // outlives context_, which uses it
  OpProfile* profile_ = nullptr;
  bool tuning_ = false;
  bool deterministic_ = true;
  Precision precision_ = Precision::kBf16;
  std::string implementation_;
  std::unique_ptr<BackendContext> context_;
};

}  // namespace sbtrain
