// Barriers in shared memory (mbarrier) on which a pipeline of asynchronous copies runs, sm_90 and
// later.
//
// A barrier completes a phase when as many threads as it was made for have arrived and as many
// bytes as they announced have been copied. Phases are counted modulo 2: the first one has parity
// 0, and wait(parity) returns as soon as the phase with that parity is complete. So wait(1) returns
// at once on a new barrier, which is how the first pass through a pipeline (pipeline.cuh) finds all
// of its stages empty.
#pragma once

#include <cstdint>

#include "kernels/primitives/async_copy.cuh"

namespace sbtrain::kernels {

#ifdef SBTRAIN_MBARRIER_TIMEOUT
// With this macro, which debug builds of a kernel define, a wait of more than two seconds ends the
// kernel with an error instead of hanging the device.
__device__ __forceinline__ uint64_t global_nanoseconds() {
  uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}
#endif

class Mbarrier {
 public:
  // By one thread; the others may use the barrier after fence_mbarrier_init() and a barrier of the
  // block.
  __device__ __forceinline__ void init(int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(address()), "r"(arrivals)
                 : "memory");
  }
  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(address()) : "memory");
  }
  // Arrives and announces `bytes` that copies of this phase will bring.
  __device__ __forceinline__ void arrive_and_expect(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(address()),
                 "r"(bytes)
                 : "memory");
  }
  // Arrives when the cp.async copies that this thread has issued are complete. It is one of the
  // arrivals that the barrier was made for.
  __device__ __forceinline__ void arrive_after_copies() {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(address())
                 : "memory");
  }
  __device__ __forceinline__ void wait(uint32_t parity) {
#ifdef SBTRAIN_MBARRIER_TIMEOUT
    if (complete(parity)) return;
    const uint64_t begin = global_nanoseconds();
    while (!complete(parity)) {
      if (global_nanoseconds() - begin > 2'000'000'000ull) __trap();
    }
#else
    while (!complete(parity)) {
    }
#endif
  }
  __device__ __forceinline__ uint32_t address() const {
    return shared_address(this);
  }

 private:
  // Waits for a limited time.
  __device__ __forceinline__ bool complete(uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(address()), "r"(parity)
        : "memory");
    return done != 0;
  }

  uint64_t word_;
};

// Makes initialised barriers visible to the copy engine. By the thread that initialised them.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

}  // namespace sbtrain::kernels
