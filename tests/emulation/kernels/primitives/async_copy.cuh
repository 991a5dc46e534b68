// Replaces cp.async (emulation/emulator.h): the bytes are there at once.
#pragma once

#include <cstdint>
#include <cstring>

namespace sbtrain::kernels {

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - memory);
}

template <int kBytes>
void cp_async(uint32_t shared, const void* global, bool valid) {
  emulation::check(shared % kBytes == 0 && reinterpret_cast<uintptr_t>(global) % kBytes == 0,
                   "cp.async of an address that is not aligned");
  emulation::check(shared + kBytes <= kMaxSharedBytes, "cp.async beyond the shared memory");
  if (valid) {
    std::memcpy(memory + shared, global, kBytes);
  } else {
    std::memset(memory + shared, 0, kBytes);
  }
}
inline void cp_async16(uint32_t shared, const void* global, bool valid = true) {
  cp_async<16>(shared, global, valid);
}
inline void cp_async4(uint32_t shared, const void* global, bool valid = true) {
  cp_async<4>(shared, global, valid);
}
inline void cp_async_commit() {}
template <int kPending>
void cp_async_wait() {}

template <int kBytes, typename Group>
void copy_bytes(const Group& group, void* shared, const void* global) {
  for (int i = 16 * group.thread(); i < kBytes; i += 16 * Group::kThreads) {
    cp_async16(shared_address(shared) + static_cast<uint32_t>(i),
               static_cast<const char*>(global) + i);
  }
}

}  // namespace sbtrain::kernels
