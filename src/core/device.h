// Raw memory of the backends. Everything above this layer takes its memory from Memory
// (core/memory.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/backend.h"

namespace sbtrain {

// Whether this build has the CUDA backend.
bool has_cuda();

// Whether a CUDA device can be used by this build on this machine; if not, `why` says what is
// missing.
bool cuda_available(std::string* why = nullptr);

// Memory on the backend's device, aligned to 256 bytes; null when there is not enough.
void* device_allocate(Backend backend, size_t bytes);
void device_free(Backend backend, void* data) noexcept;

// Waits until the device is idle and sets every byte. For tests.
void device_fill(Backend backend, void* data, uint8_t value, size_t bytes) noexcept;

// The free and the total bytes of the device's memory; on the CPU, those of core/host_memory.h.
struct DeviceMemory {
  size_t free = 0;
  size_t total = 0;
};
DeviceMemory device_memory(Backend backend);

// The bytes that libraries take of a GPU beside what Memory plans: CUDA, cuBLAS and cuDNN, and in a
// job of several ranks NCCL. Measured on H200s in training steps of 350 million to 1.2 billion
// parameters, among which it differs by 0.1 GiB. 0 for the CPU.
size_t library_memory(Backend backend, int world);

}  // namespace sbtrain
