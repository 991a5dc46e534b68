#include "core/pinned_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "core/build_options.h"

#if SBTRAIN_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

#include "core/device.h"
#include "core/error.h"
#include "core/gpus.h"

namespace sbtrain {

PinnedMemory::PinnedMemory(Backend backend, size_t bytes, std::string_view what) : bytes_(bytes) {
  if (bytes == 0 || backend == Backend::kPlan) return;
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    fail(ExitCode::kOutOfMemory, "out of memory: {} needs {:.2f} GiB of the host's memory", what,
         static_cast<double>(bytes) / (1 << 30));
  }
  data_ = static_cast<std::byte*>(data);
  ::madvise(data, bytes, MADV_HUGEPAGE);  // only a hint: fewer and larger pages are locked sooner
  if (backend == Backend::kCuda) pin();
}

void PinnedMemory::pin() {
#if SBTRAIN_HAS_CUDA
  use_chosen_gpu();
  cudaError_t error = cudaSuccess;
  for (size_t at = 0; at < bytes_ && error == cudaSuccess; at += kPiece) {
    const size_t bytes = std::min(kPiece, bytes_ - at);
    std::memset(data_ + at, 0, bytes);  // makes the pages without holding a lock of the driver
    error = cudaHostRegister(data_ + at, bytes, cudaHostRegisterDefault);
    if (error == cudaSuccess) pinned_.push_back(data_ + at);
  }
  if (error == cudaSuccess) return;
  cudaGetLastError();
  refused_ = cudaGetErrorString(error);
#endif
}

PinnedMemory::~PinnedMemory() {
#if SBTRAIN_HAS_CUDA
  for (void* piece : pinned_) cudaHostUnregister(piece);
#endif
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

}  // namespace sbtrain
