// The largest absolute value of what a kernel writes, found on the way (ops/fp8.h).
#pragma once

#include "kernels/pack.cuh"

namespace sbtrain::kernels {

// The bits of the largest |x| as f32: without sign, bit patterns are ordered as numbers are, with
// NaN above all of them.
template <int kWidth>
__device__ unsigned largest_bits(const Pack<bf16, kWidth>& x) {
  unsigned largest = 0;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    largest = max(largest, (__bfloat16_as_ushort(x[i]) & 0x7fffu) << 16);
  }
  return largest;
}

// Raises *amax to the largest of the warp's, all of whose threads call it. The order in which warps
// come does not matter, and few find that they have to raise it.
inline __device__ void raise_amax(float* amax, unsigned largest) {
  largest = __reduce_max_sync(~0u, largest);
  auto* bits = reinterpret_cast<unsigned*>(amax);
  if (threadIdx.x % 32 == 0 && largest > *static_cast<volatile unsigned*>(bits)) {
    atomicMax(bits, largest);
  }
}

inline void clear_amax(const char* name, cudaStream_t stream, float* amax) {
  check_cuda(name, cudaMemsetAsync(amax, 0, sizeof(float), stream));
}

}  // namespace sbtrain::kernels
