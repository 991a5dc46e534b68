// The index of a block, where it must not stay in a register.
#pragma once

#include <cstdint>

namespace sbtrain::kernels {

// blockIdx.y, read again at every call.
__device__ __forceinline__ unsigned read_block_y() {
  unsigned y;
  asm volatile("mov.u32 %0, %%ctaid.y;\n" : "=r"(y));
  return y;
}

}  // namespace sbtrain::kernels
