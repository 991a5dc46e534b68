// Products of one warp on tensor cores (mma.sync), sm_80 and later. Lanes hold, with g = lane / 4
// and q = lane % 4, of the bf16 product m16n8k16, c = 2 q:
//   A [16, 16]  a[0] (g, c..c+1)  a[1] (g+8, c..)  a[2] (g, c+8..)  a[3] (g+8, c+8..)
//   B [16, 8]   b[0] (c..c+1, g)  b[1] (c+8.., g)
// of the bf16 product m16n8k8:
//   A [16, 8]   a0 (g, c..c+1)  a1 (g+8, c..)
//   B [8, 8]    b (c..c+1, g)
// of the tf32 product m16n8k8:
//   A [16, 8]   a[0] (g, q)  a[1] (g+8, q)  a[2] (g, q+4)  a[3] (g+8, q+4)
//   B [8, 8]    b0 (q, g)  b1 (q+4, g)
// and of all:
//   C [16, 8]   c[0], c[1] (g, 2q..2q+1)   c[2], c[3] (g+8, 2q..2q+1)
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace sbtrain::kernels {

// c += a b.
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&c)[4], const uint32_t (&a)[4],
                                                  uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_m16n8k8_bf16(float (&c)[4], uint32_t a0, uint32_t a1,
                                                 uint32_t b) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b));
}
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                 uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// x with the 10 bits of mantissa that tf32 has, to nearest.
__device__ __forceinline__ uint32_t to_tf32(float x) {
  uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

// Two floats, rounded to bf16, the first in the low half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// The sums of two pairs of bf16, rounded.
__device__ __forceinline__ uint32_t add_bf16(uint32_t x, uint32_t y) {
  const __nv_bfloat162 sum = __hadd2(*reinterpret_cast<const __nv_bfloat162*>(&x),
                                     *reinterpret_cast<const __nv_bfloat162*>(&y));
  return *reinterpret_cast<const uint32_t*>(&sum);
}

// The A [16, 16] of two C [16, 8] side by side, rounded to bf16.
__device__ __forceinline__ void accumulator_as_a(uint32_t (&a)[4], const float (&left)[4],
                                                 const float (&right)[4]) {
  a[0] = pack_bf16(left[0], left[1]);
  a[1] = pack_bf16(left[2], left[3]);
  a[2] = pack_bf16(right[0], right[1]);
  a[3] = pack_bf16(right[2], right[3]);
}

}  // namespace sbtrain::kernels
