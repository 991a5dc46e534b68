#include "kernels/c_api/call.h"

#include <cuda.h>

#include <array>
#include <atomic>

#include "kernels/attention/hopper_shapes.h"
#include "kernels/limits.h"

namespace sbtrain::c_api {
namespace {

thread_local char last_error[1024];

int driver_version() {
  int version = 0;
  if (cudaDriverGetVersion(&version) != cudaSuccess) version = 0;
  return version;
}

std::string dotted(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// The driver's function of this name. The library is not linked with the driver, so that it loads
// where there is none.
template <typename Function>
Function driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &result);
#else
  const cudaError_t error = cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &result);
#endif
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) {
    throw Error(SBTRAIN_DRIVER, std::string("the CUDA driver has no ") + name);
  }
  return reinterpret_cast<Function>(function);
}

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  kernels::check_cuda("attribute of the device", cudaDeviceGetAttribute(&value, which, device));
  return value;
}

// The compute capability of a GPU of this machine. What the runtime says of one does not change, so
// that it is asked at the first call only, which keeps the others short.
int capability_of(int device) {
  static std::array<std::atomic<int>, 64> known{};  // 0: not asked yet
  const bool kept = device >= 0 && device < static_cast<int>(known.size());
  if (kept) {
    const int value = known[static_cast<size_t>(device)].load(std::memory_order_relaxed);
    if (value != 0) return value;
  }
  require_driver();
  int devices = 0;
  kernels::check_cuda("cudaGetDeviceCount", cudaGetDeviceCount(&devices));
  require_field(device >= 0 && device < devices, "device", device, "a GPU of this machine");
  const int value = 10 * attribute(cudaDevAttrComputeCapabilityMajor, device) +
                    attribute(cudaDevAttrComputeCapabilityMinor, device);
  if (kept) known[static_cast<size_t>(device)].store(value, std::memory_order_relaxed);
  return value;
}

}  // namespace

// Drivers run programs of their own major version of CUDA and of older ones.
void require_driver() {
  const int version = driver_version();
  if (version / 1000 >= CUDART_VERSION / 1000) return;
  const std::string needed = "CUDA " + dotted(CUDART_VERSION / 1000 * 1000) +
                             " or later (nvidia-smi " + (CUDART_VERSION >= 13000 ? "580" : "525") +
                             ")";
  throw Error(SBTRAIN_DRIVER, version == 0 ? "there is no NVIDIA driver on this machine; one for " +
                                                 needed + " is needed"
                                           : "the NVIDIA driver is for CUDA " + dotted(version) +
                                                 ", but this library needs one for " + needed);
}

CurrentDevice::CurrentDevice(int device) {
  static const auto get = driver_function<CUresult (*)(CUcontext*)>("cuCtxGetCurrent");
  get(reinterpret_cast<CUcontext*>(&before_));
  kernels::check_cuda("cudaSetDevice", cudaSetDevice(device));
}

CurrentDevice::~CurrentDevice() {
  static const auto set = driver_function<CUresult (*)(CUcontext)>("cuCtxSetCurrent");
  set(static_cast<CUcontext>(before_));
}

Device device_of(int device, int planned) {
  if (planned == 0) planned = capability_of(device);
  if (planned < 80) {
    unsupported("GPUs of compute capability " + std::to_string(planned / 10) + "." +
                std::to_string(planned % 10) + "; the kernels need 8.0 or later");
  }
  const bool little = planned == 86 || planned == 89 || planned / 10 == 12;
  return {.capability = planned, .much_shared = !little};
}

bool has_hopper(const Device& device, int64_t tokens, int head_dim) {
#ifdef SBTRAIN_NO_SM90A
  return false;
#endif
  return device.capability == 90 && kernels::hopper_takes_heads(head_dim) &&
         kernels::hopper_takes_packs(tokens);
}

int report(int code, const char* text) noexcept {
  std::strncpy(last_error, text, sizeof last_error - 1);
  return code;
}

}  // namespace sbtrain::c_api

// ---- What all structs share ---------------------------------------------------------------------

using namespace sbtrain::c_api;

const char* sbtrain_code_name(int code) {
  constexpr const char* kNames[] = {"ok",     "invalid", "unsupported", "version",
                                    "driver", "cuda",    "internal"};
  return code >= 0 && code < static_cast<int>(std::size(kNames)) ? kNames[code] : "unknown";
}

const char* sbtrain_last_error(void) {
  return last_error;
}

uint32_t sbtrain_attention_version(void) {
  return SBTRAIN_ATTENTION_VERSION;
}

const char* sbtrain_attention_build(void) {
  static const std::string text = "sbtrain " SBTRAIN_RELEASE ", CUDA " + dotted(CUDART_VERSION) +
                                  ", architectures " SBTRAIN_ARCHITECTURES;
  return text.c_str();
}

int sbtrain_check_driver(void) {
  return call([] { require_driver(); });
}
