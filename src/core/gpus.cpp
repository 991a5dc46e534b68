#include "core/gpus.h"

#include <algorithm>
#include <array>
#include <atomic>

#include "core/build_options.h"

#if SBTRAIN_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

#include "core/error.h"

namespace sbtrain {
namespace {

// CUDA keeps the choice for each thread, and every new thread begins with the first GPU.
std::atomic<int> chosen{-1};

}  // namespace

#if SBTRAIN_HAS_CUDA

int visible_gpus() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

void choose_gpu(int index) {
  const cudaError_t error = cudaSetDevice(index);
  if (error != cudaSuccess) {
    fail(ExitCode::kInternal, "cannot use GPU {} of {}: {}", index, visible_gpus(),
         cudaGetErrorString(error));
  }
  chosen = index;
}

// Only NVLink has atomics between GPUs.
bool nvlink_connects_gpus() {
  const int gpus = visible_gpus();
  for (int from = 0; from < gpus; ++from) {
    for (int to = 0; to < gpus; ++to) {
      int atomics = 0;
      if (from != to && (cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported,
                                                   from, to) != cudaSuccess ||
                         atomics == 0)) {
        return false;
      }
    }
  }
  return gpus > 1;
}

std::string gpu_name(int index) {
  cudaDeviceProp properties{};
  return cudaGetDeviceProperties(&properties, index) == cudaSuccess ? properties.name : "";
}

std::string gpu_address(int index) {
  std::array<char, 64> address{};
  const auto size = static_cast<int>(address.size());
  return cudaDeviceGetPCIBusId(address.data(), size, index) == cudaSuccess ? address.data() : "";
}

std::string cuda_of_driver() {
  int version = 0;
  if (cudaDriverGetVersion(&version) != cudaSuccess || version == 0) return "";
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

#else

int visible_gpus() {
  return 0;
}

void choose_gpu(int index) {
  fail(ExitCode::kInternal, "this build has no GPU {}", index);
}

bool nvlink_connects_gpus() {
  return false;
}

std::string gpu_name(int) {
  return "";
}

std::string gpu_address(int) {
  return "";
}

std::string cuda_of_driver() {
  return "";
}

#endif

void use_chosen_gpu() {
  if (chosen >= 0) choose_gpu(chosen);
}

int chosen_gpu() {
  return std::max<int>(chosen, 0);
}

}  // namespace sbtrain
