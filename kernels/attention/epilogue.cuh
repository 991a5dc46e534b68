// How a warp's results leave its registers: rows of an accumulator, each times a factor of its own,
// rounded to bf16.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/primitives/accumulator.cuh"
#include "kernels/primitives/mma.cuh"

namespace sbtrain::kernels {

// Writes rows [0, rows) and columns [0, cols) of the warp's accumulator, the lane's row i times
// factor(i). cols and the stride are multiples of 8, `out` is aligned to 4 bytes.
template <int kRowBlocks, int kColBlocks, typename Factor>
__device__ __forceinline__ void store_rows(__nv_bfloat16* out, int64_t stride, int rows, int cols,
                                           const Accumulator<kRowBlocks, kColBlocks>& x,
                                           Factor&& factor) {
  const int row = lane_row(), col = lane_col();
#pragma unroll
  for (int i = 0; i < 2 * kRowBlocks; ++i) {
    if (row + i * 8 >= rows) continue;
    const float f = factor(i);
    __nv_bfloat16* to = out + (row + i * 8) * stride + col;
#pragma unroll
    for (int c = 0; c < kColBlocks; ++c) {
      if (c * 8 >= cols) break;
      const float* pair = x.at[i / 2][c] + i % 2 * 2;
      *reinterpret_cast<uint32_t*>(to + c * 8) = pack_bf16(pair[0] * f, pair[1] * f);
    }
  }
}

// out = keep(i) out + factor(i) x, f32. The stride is even and `out` is aligned to 8 bytes.
template <int kRowBlocks, int kColBlocks, typename Keep, typename Factor>
__device__ __forceinline__ void combine_rows(float* out, int64_t stride, int rows, int cols,
                                             const Accumulator<kRowBlocks, kColBlocks>& x,
                                             Keep&& keep, Factor&& factor) {
  const int row = lane_row(), col = lane_col();
#pragma unroll
  for (int i = 0; i < 2 * kRowBlocks; ++i) {
    if (row + i * 8 >= rows) continue;
    const float k = keep(i), f = factor(i);
    float* to = out + (row + i * 8) * stride + col;
#pragma unroll
    for (int c = 0; c < kColBlocks; ++c) {
      if (c * 8 >= cols) break;
      const float* pair = x.at[i / 2][c] + i % 2 * 2;
      float2& sum = *reinterpret_cast<float2*>(to + c * 8);
      sum = make_float2(fmaf(pair[0], f, k * sum.x), fmaf(pair[1], f, k * sum.y));
    }
  }
}

// out += factor(i) x, likewise: the same instructions as without a factor of out.
template <int kRowBlocks, int kColBlocks, typename Factor>
__device__ __forceinline__ void add_rows(float* out, int64_t stride, int rows, int cols,
                                         const Accumulator<kRowBlocks, kColBlocks>& x,
                                         Factor&& factor) {
  combine_rows(
      out, stride, rows, cols, x, [](int) { return 1.0f; }, factor);
}

// The same for any number of columns and any alignment, rounded to bf16. With `pairs` the rows of
// `out` are aligned to two elements and cols is even.
template <int kRowBlocks, int kColBlocks, typename Factor>
__device__ __forceinline__ void store_any_rows(__nv_bfloat16* out, int64_t stride, int rows,
                                               int cols, bool pairs,
                                               const Accumulator<kRowBlocks, kColBlocks>& x,
                                               Factor&& factor) {
  const int row = lane_row(), col = lane_col();
#pragma unroll
  for (int i = 0; i < 2 * kRowBlocks; ++i) {
    if (row + i * 8 >= rows) continue;
    const float f = factor(i);
    __nv_bfloat16* to = out + (row + i * 8) * stride + col;
#pragma unroll
    for (int c = 0; c < kColBlocks; ++c) {
      const float* pair = x.at[i / 2][c] + i % 2 * 2;
      if (pairs) {
        if (c * 8 + col >= cols) continue;
        *reinterpret_cast<uint32_t*>(to + c * 8) = pack_bf16(pair[0] * f, pair[1] * f);
      } else {
        if (c * 8 + col < cols) to[c * 8] = __float2bfloat16_rn(pair[0] * f);
        if (c * 8 + col + 1 < cols) to[c * 8 + 1] = __float2bfloat16_rn(pair[1] * f);
      }
    }
  }
}

}  // namespace sbtrain::kernels
