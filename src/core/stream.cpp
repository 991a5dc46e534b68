#include "core/stream.h"

#include <cstring>

#include "core/build_options.h"
#include "core/device.h"
#include "core/error.h"

#if SBTRAIN_HAS_CUDA
#include "core/cuda_check.h"
#endif

namespace sbtrain {

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
    check_cuda(state, "cudaEventQuery");
  }
#endif
  return true;
}

void Event::synchronize() const {
#if SBTRAIN_HAS_CUDA
  if (native_) check_cuda(cudaEventSynchronize(native_), "cudaEventSynchronize");
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
  require(backend() == Backend::kCuda && has_cuda(), "a stream of backend {} has no queue",
          backend_name(backend()));
#if SBTRAIN_HAS_CUDA
  if (!queue_) {
    int lowest = 0;
    int highest = 0;
    check_cuda(cudaDeviceGetStreamPriorityRange(&lowest, &highest),
               "cudaDeviceGetStreamPriorityRange");
    cudaStream_t queue = nullptr;
    check_cuda(cudaStreamCreateWithPriority(&queue, cudaStreamNonBlocking,
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
    check_cuda(cudaEventCreateWithFlags(&event.native_, cudaEventDisableTiming), "cudaEventCreate");
  }
  check_cuda(cudaEventRecord(event.native_, queue()), "cudaEventRecord");
#endif
}

void Stream::wait(const Event& event) {
  memory_->wait(id_, event.clock_);
#if SBTRAIN_HAS_CUDA
  if (event.native_)
    check_cuda(cudaStreamWaitEvent(queue(), event.native_, 0), "cudaStreamWaitEvent");
#endif
}

void Stream::copy_bytes(void* to, const void* from, size_t bytes) {
  if (planning() || bytes == 0) return;
  if (backend() == Backend::kCpu) {
    std::memmove(to, from, bytes);
    return;
  }
#if SBTRAIN_HAS_CUDA
  check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, queue()),
             "cudaMemcpyAsync");
#endif
}

}  // namespace sbtrain
