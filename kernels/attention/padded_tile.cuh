// Tiles of bf16 for heads of any size and alignment: row-major [rows, kCols] in shared memory,
// kCols a multiple of 16, with 16 bytes behind each row so that fragments meet no bank conflicts.
// Copied through registers, 16, 8 or 2 bytes at a time. Also the tensor core's tf32 product.
// Lanes hold, g = lane / 4 and c = lane % 4, of tf32 operands:
//   A [16, 8]  a[0] (g, c)  a[1] (g+8, c)  a[2] (g, c+4)  a[3] (g+8, c+4)
//   B [8, 8]   b0 (c, g)  b1 (c+4, g)
// and of C the same as in mma.cuh.
#pragma once

#include "kernels/attention/tile_products.cuh"
#include "kernels/pack.cuh"

namespace sbtrain::kernels {

template <int kCols>
inline constexpr int kPaddedStride = kCols + 8;

template <int kRows, int kCols, int kThreads, int kWidth>
__device__ __forceinline__ void load_padded_packs(bf16* tile, const bf16* global, int64_t stride,
                                                  int rows, int cols) {
  constexpr int kPacks = kCols / kWidth;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kPacks; i += kThreads) {
    const int row = i / kPacks;
    const int col = i % kPacks * kWidth;
    Pack<bf16, kWidth> x{};
    if (row < rows && col < cols) x = load_pack<kWidth>(global + row * stride + col);
    store_pack(tile + row * kPaddedStride<kCols> + col, x);
  }
}

// Copies rows [0, rows) and columns [0, cols) of a global matrix to a tile of kRows rows; the rest
// of the tile becomes zero. `width` elements at a time, 8, 4 or 1: it divides cols and the stride,
// and the rows are aligned to it.
template <int kRows, int kCols, int kThreads>
__device__ __forceinline__ void load_padded(bf16* tile, const bf16* global, int64_t stride,
                                            int rows, int cols, int width) {
  if (width == 8) {
    load_padded_packs<kRows, kCols, kThreads, 8>(tile, global, stride, rows, cols);
  } else if (width == 4) {
    load_padded_packs<kRows, kCols, kThreads, 4>(tile, global, stride, rows, cols);
  } else {
    load_padded_packs<kRows, kCols, kThreads, 1>(tile, global, stride, rows, cols);
  }
}

// s = x y^T over kCols columns, of 16 * kRowBlocks rows of tile x from `row` on and the
// 8 * kColBlocks rows of tile y.
template <int kCols, int kRowBlocks, int kColBlocks>
__device__ __forceinline__ void padded_product(Accumulator<kRowBlocks, kColBlocks>& s,
                                               const bf16* x, int row, const bf16* y) {
  constexpr int kStride = kPaddedStride<kCols>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  tile_product<kCols / 16>(
      s,
      [&](uint32_t(&a)[kRowBlocks][4], int k) {
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r) {
          const int offset = (row + r * 16 + lane % 16) * kStride + k * 16 + lane / 16 * 8;
          ldmatrix_x4(a[r], shared_address(x + offset));
        }
      },
      [&](uint32_t(&b)[4], int c, int k) {
        const int offset = (c * 8 + lane % 8 + lane / 16 * 8) * kStride + k * 16 + lane / 8 % 2 * 8;
        ldmatrix_x4(b, shared_address(y + offset));
      });
}

// o += p x, p rounded to bf16, x a tile [8 * kInner, kCols].
template <int kCols, int kRowBlocks, int kInner>
__device__ __forceinline__ void add_padded_product(Accumulator<kRowBlocks, kCols / 8>& o,
                                                   const Accumulator<kRowBlocks, kInner>& p,
                                                   const bf16* x) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  add_tile_product(o, p, [&](uint32_t(&b)[4], int k, int c) {
    const int offset = (k * 8 + lane % 16) * kPaddedStride<kCols> + c * 8 + lane / 16 * 8;
    ldmatrix_x4_trans(b, shared_address(x + offset));
  });
}

// Writes rows [0, rows) and columns [0, cols) of the warp's accumulator, rounded, each row times
// factor(lane row). With `pairs` the rows of `out` are aligned to two elements and cols is even.
template <int kRowBlocks, int kColBlocks, typename Factor>
__device__ __forceinline__ void store_padded(bf16* out, int64_t stride, int rows, int cols,
                                             bool pairs,
                                             const Accumulator<kRowBlocks, kColBlocks>& x,
                                             Factor&& factor) {
  const int row = lane_row(), col = lane_col();
#pragma unroll
  for (int i = 0; i < 2 * kRowBlocks; ++i) {
    if (row + i * 8 >= rows) continue;
    const float f = factor(i);
    bf16* to = out + (row + i * 8) * stride + col;
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

// x with the 10 bits of mantissa that tf32 has, to nearest.
__device__ __forceinline__ uint32_t to_tf32(float x) {
  uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

// c += a b.
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                 uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace sbtrain::kernels
