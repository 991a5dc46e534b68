// Tiles of bf16 for heads of any size and alignment: row-major [rows, kCols] in shared memory,
// kCols a multiple of 16, with 16 bytes after each row so that fragments meet no bank conflicts.
// They are copied through registers, 16, 8 or 2 bytes at a time.
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

}  // namespace sbtrain::kernels
