// Four consecutive warps that work as one (sm_90a): their share of the registers, and the choice of
// one thread.
#pragma once

#include <cstdint>

namespace sbtrain::kernels {

// Sets the registers of each thread of the calling warpgroup, a multiple of 8 from 24 to 240.
// Raising waits until other warpgroups have given up enough.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

// threadIdx.x, read once more: what follows from it is computed where it is used, and keeps no
// register until then.
__device__ __forceinline__ unsigned reread_thread() {
  unsigned thread;
  asm volatile("mov.u32 %0, %%tid.x;\n" : "=r"(thread));
  return thread;
}

// Whether this is the one thread of the converged warp that the hardware picks.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(elected));
  return elected != 0;
}

}  // namespace sbtrain::kernels
