#include "core/stream.h"

#include <cstring>

#if SBTRAIN_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

#include "core/device.h"
#include "core/error.h"

namespace sbtrain {
namespace {

#if SBTRAIN_HAS_CUDA
void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  fail(ExitCode::kInternal, "CUDA: {} failed: {}", call, cudaGetErrorString(error));
}
#endif

}  // namespace

// ---- Event ------------------------------------------------------------------------------------

Event& Event::operator=(Event&& other) noexcept {
  std::swap(native_, other.native_);
  std::swap(clock_, other.clock_);
  return *this;
}

Event::~Event() {
#if SBTRAIN_HAS_CUDA
  if (native_) cudaEventDestroy(native_);
#endif
}

bool Event::done() const {
#if SBTRAIN_HAS_CUDA
  if (native_) {
    const cudaError_t state = cudaEventQuery(native_);
    if (state == cudaErrorNotReady) return false;
    check(state, "cudaEventQuery");
  }
#endif
  return true;
}

void Event::synchronize() const {
#if SBTRAIN_HAS_CUDA
  if (native_) check(cudaEventSynchronize(native_), "cudaEventSynchronize");
#endif
}

// ---- Stream -----------------------------------------------------------------------------------

Stream::Stream(Memory& memory, std::string_view name, StreamPriority priority)
    : memory_(&memory), id_(memory.stream(name)), priority_(priority) {}

void Stream::QueueDeleter::operator()([[maybe_unused]] CUstream_st* queue) const {
#if SBTRAIN_HAS_CUDA
  cudaStreamSynchronize(queue);
  cudaStreamDestroy(queue);
#endif
}

CUstream_st* Stream::queue() {
  require(backend() == Backend::kCuda && kHasCuda, "a stream of backend {} has no queue",
          backend_name(backend()));
#if SBTRAIN_HAS_CUDA
  if (!queue_) {
    int lowest = 0;
    int highest = 0;
    check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange");
    cudaStream_t queue = nullptr;
    check(cudaStreamCreateWithPriority(&queue, cudaStreamNonBlocking,
                                       priority_ == StreamPriority::kHigh ? highest : lowest),
          "cudaStreamCreateWithPriority");
    queue_.reset(queue);
  }
#endif
  return queue_.get();
}

void Stream::record(Event& event) {
  event.clock_ = memory_->record(id_);
#if SBTRAIN_HAS_CUDA
  if (backend() != Backend::kCuda) return;
  if (!event.native_) {
    check(cudaEventCreateWithFlags(&event.native_, cudaEventDisableTiming), "cudaEventCreate");
  }
  check(cudaEventRecord(event.native_, queue()), "cudaEventRecord");
#endif
}

void Stream::wait(const Event& event) {
  memory_->wait(id_, event.clock_);
#if SBTRAIN_HAS_CUDA
  if (event.native_) check(cudaStreamWaitEvent(queue(), event.native_, 0), "cudaStreamWaitEvent");
#endif
}

void Stream::copy_bytes(void* to, const void* from, size_t bytes) {
  if (planning() || bytes == 0) return;
  if (backend() == Backend::kCpu) {
    std::memmove(to, from, bytes);
    return;
  }
#if SBTRAIN_HAS_CUDA
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, queue()), "cudaMemcpyAsync");
#endif
}

}  // namespace sbtrain
