#include "core/device.h"

#include <cstdlib>
#include <cstring>

#include "core/build_options.h"

#if SBTRAIN_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

#include "core/error.h"
#include "core/host_memory.h"
#include "core/target.h"

namespace sbtrain {
namespace {

constexpr size_t kAlignment = 256;

// Allocations on the host from this size on are compared with what the machine has. Smaller ones
// are frequent, and the comparison reads several files.
constexpr size_t kLargeAllocation = size_t{256} << 20;

}  // namespace

const char* backend_name(Backend backend) {
  switch (backend) {
    case Backend::kPlan:
      return "plan";
    case Backend::kCpu:
      return "cpu";
    case Backend::kCuda:
      return "cuda";
  }
  return "?";
}

bool has_cuda() {
  return SBTRAIN_HAS_CUDA != 0;
}

bool cuda_available([[maybe_unused]] std::string* why) {
  const auto no = [&](std::string reason) {
    if (why) *why = std::move(reason);
    return false;
  };
#if SBTRAIN_HAS_CUDA
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  int driver = 0;  // stays 0 without a driver
  if (error == cudaErrorInsufficientDriver && cudaDriverGetVersion(&driver) == cudaSuccess &&
      driver == 0) {
    return no("there is no NVIDIA driver");
  }
  if (error != cudaSuccess) return no(cudaGetErrorString(error));
  if (devices == 0) return no("there is no CUDA device");
  int major = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
  if (major < 8) return no("the GPU is older than compute capability 8.0, which bf16 needs");
  return true;
#else
  return no("this build has only the CPU backend");
#endif
}

Target present_target(Backend backend) {
  Target target(backend);
#if SBTRAIN_HAS_CUDA
  if (backend != Backend::kCuda || !cuda_available()) return target;
  int device = 0;
  int major = 0;
  int minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  cudaDeviceGetAttribute(&target.multiprocessors, cudaDevAttrMultiProcessorCount, device);
  target.sm = 10 * major + minor;
#endif
  return target;
}

void* device_allocate(Backend backend, size_t bytes) {
  bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (bytes == 0) bytes = kAlignment;
  if (backend == Backend::kCpu) {
    if (bytes >= kLargeAllocation && bytes > host_memory().free) return nullptr;
    return std::aligned_alloc(kAlignment, bytes);
  }
#if SBTRAIN_HAS_CUDA
  void* data = nullptr;
  const cudaError_t error = cudaMalloc(&data, bytes);
  if (error == cudaSuccess) return data;
  cudaGetLastError();  // an allocation that failed leaves the device usable
  if (error == cudaErrorMemoryAllocation) return nullptr;
  fail(ExitCode::kInternal, "CUDA: {}", cudaGetErrorString(error));
#else
  fail(ExitCode::kInternal, "this build has no {} backend", backend_name(backend));
#endif
}

void device_free(Backend backend, void* data) noexcept {
  if (backend != Backend::kCuda) std::free(data);
#if SBTRAIN_HAS_CUDA
  if (backend == Backend::kCuda) cudaFree(data);
#endif
}

void device_fill(Backend backend, void* data, uint8_t value, size_t bytes) noexcept {
  if (backend == Backend::kCpu) std::memset(data, value, bytes);
#if SBTRAIN_HAS_CUDA
  if (backend != Backend::kCuda) return;
  cudaDeviceSynchronize();
  cudaMemset(data, value, bytes);
#endif
}

DeviceMemory device_memory(Backend backend) {
  DeviceMemory memory;
  if (backend == Backend::kCpu) {
    const HostMemory host = host_memory();
    return {.free = host.free, .total = host.total};
  }
#if SBTRAIN_HAS_CUDA
  if (backend == Backend::kCuda) cudaMemGetInfo(&memory.free, &memory.total);
#endif
  return memory;
}

size_t library_memory(Backend backend, int world) {
  if (backend != Backend::kCuda) return 0;
  constexpr size_t kCuda = size_t{300} << 20;
  constexpr size_t kNccl = size_t{820} << 20;
  return kCuda + (world > 1 ? kNccl : 0);
}

}  // namespace sbtrain
