// Asynchronous copies from global to shared memory (cp.async), sm_80 and later.
#pragma once

#include <cstdint>

namespace sbtrain::kernels {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes, or writes zeros where not `valid` (`global` is not read then, but must be an
// address). Both are aligned to 16.
__device__ __forceinline__ void cp_async16(uint32_t shared, const void* global, bool valid = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}
// The same for 4 bytes, aligned to 4.
__device__ __forceinline__ void cp_async4(uint32_t shared, const void* global, bool valid = true) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(shared), "l"(global),
               "r"(valid ? 4 : 0)
               : "memory");
}
// Ends this thread's group of copies.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}
// Waits until at most kPending of this thread's groups are still incomplete. What other threads
// copied is visible only after a barrier of all of them as well.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// Copies kBytes, a multiple of 16, by all threads of a group (thread_group.cuh).
template <int kBytes, typename Group>
__device__ __forceinline__ void copy_bytes(const Group& group, void* shared, const void* global) {
  constexpr int kChunks = kBytes / 16;
  static_assert(kBytes % 16 == 0 && kChunks <= 4 * Group::kThreads);
#pragma unroll
  for (int first = 0; first < kChunks; first += Group::kThreads) {
    const int i = first + group.thread();
    if (i < kChunks) {
      cp_async16(shared_address(shared) + 16 * i, static_cast<const char*>(global) + 16 * i);
    }
  }
}

}  // namespace sbtrain::kernels
