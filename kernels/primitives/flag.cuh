// Numbers in device memory with which one block tells another how far it has come, sm_70 and later.
#pragma once

#include <cstdint>

#include "kernels/primitives/mbarrier.cuh"

namespace sbtrain::kernels {

// Waits until the flag has this value. What was written before store_release() is visible then. By
// one thread; others see it after a barrier with it.
__device__ __forceinline__ void wait_for_value(const int* flag, int value) {
  int found;
#ifdef SBTRAIN_MBARRIER_TIMEOUT
  const uint64_t begin = global_nanoseconds();
#endif
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n" : "=r"(found) : "l"(flag) : "memory");
#ifdef SBTRAIN_MBARRIER_TIMEOUT
    if (global_nanoseconds() - begin > 2'000'000'000ull) __trap();
#endif
  } while (found != value);
}

// Sets the flag after all that this thread has written, or seen by a barrier.
__device__ __forceinline__ void store_release(int* flag, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;\n" ::"l"(flag), "r"(value) : "memory");
}

}  // namespace sbtrain::kernels
