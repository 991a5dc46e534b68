// The two matrix products that attention is made of, for one warp: with the rows of a tile, and
// with accumulators that become operands without leaving the registers.
#pragma once

#include "kernels/primitives/accumulator.cuh"
#include "kernels/primitives/fragments.cuh"
#include "kernels/primitives/mma.cuh"

namespace sbtrain::kernels {

// Rows [row, row + 16 * kRowBlocks) of a tile [.., kD] as left operand; kept in registers, or read
// again for every product.
template <int kRowBlocks, int kD, bool kKeep>
class TileRows {
 public:
  __device__ __forceinline__ TileRows(const __nv_bfloat16* tile, int row)
      : tile_(tile + row * kD) {}
  // To be called when the tile has arrived.
  __device__ __forceinline__ void load() {
    if constexpr (kKeep) {
#pragma unroll
      for (int k = 0; k < kD / 16; ++k) read(kept_[k], k);
    }
  }
  __device__ __forceinline__ void get(uint32_t (&a)[kRowBlocks][4], int k) const {
    if constexpr (kKeep) {
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[r][i] = kept_[k][r][i];
      }
    } else {
      read(a, k);
    }
  }

 private:
  __device__ __forceinline__ void read(uint32_t (&a)[kRowBlocks][4], int k) const {
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) load_a<kD>(a[r], tile_, r * 16, k * 16);
  }
  const __nv_bfloat16* tile_;
  uint32_t kept_[kKeep ? kD / 16 : 1][kRowBlocks][4];
};

// s = x y^T over kSteps * 16 columns. left(a, k) and right(b, c, k) load the operands of step k: of
// the rows of x, and of two blocks of 8 rows of y from block c on.
template <int kSteps, int kRowBlocks, int kColBlocks, typename Left, typename Right>
__device__ __forceinline__ void tile_product(Accumulator<kRowBlocks, kColBlocks>& s, Left&& left,
                                             Right&& right) {
  s.clear();
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    uint32_t a[kRowBlocks][4];
    left(a, k);
#pragma unroll
    for (int c = 0; c < kColBlocks; c += 2) {
      uint32_t b[4];
      right(b, c, k);
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r) {
        mma_m16n8k16_bf16(s.at[r][c], a[r], b[0], b[1]);
        mma_m16n8k16_bf16(s.at[r][c + 1], a[r], b[2], b[3]);
      }
    }
  }
}

// o += p x, p rounded to bf16. right(b, k, c) loads 16 rows of x from block k of 8 on and two
// blocks of 8 columns from block c on.
template <int kRowBlocks, int kColBlocks, int kInner, typename Right>
__device__ __forceinline__ void add_tile_product(Accumulator<kRowBlocks, kColBlocks>& o,
                                                 const Accumulator<kRowBlocks, kInner>& p,
                                                 Right&& right) {
#pragma unroll
  for (int k = 0; k < kInner; k += 2) {
    uint32_t a[kRowBlocks][4];
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) accumulator_as_a(a[r], p.at[r][k], p.at[r][k + 1]);
#pragma unroll
    for (int c = 0; c < kColBlocks; c += 2) {
      uint32_t b[4];
      right(b, k, c);
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r) {
        mma_m16n8k16_bf16(o.at[r][c], a[r], b[0], b[1]);
        mma_m16n8k16_bf16(o.at[r][c + 1], a[r], b[2], b[3]);
      }
    }
  }
}

// s = x y^T, y a tile [8 * kColBlocks, kD].
template <int kRowBlocks, int kColBlocks, int kD, bool kKeep>
__device__ __forceinline__ void product_with_rows(Accumulator<kRowBlocks, kColBlocks>& s,
                                                  const TileRows<kRowBlocks, kD, kKeep>& x,
                                                  const __nv_bfloat16* y) {
  tile_product<kD / 16>(
      s, [&](uint32_t(&a)[kRowBlocks][4], int k) { x.get(a, k); },
      [&](uint32_t(&b)[4], int c, int k) { load_b_trans<kD>(b, y, c * 8, k * 16); });
}

// o += p x, p rounded to bf16, x a tile [8 * kInner, kD].
template <int kRowBlocks, int kInner, int kD>
__device__ __forceinline__ void add_product(Accumulator<kRowBlocks, kD / 8>& o,
                                            const Accumulator<kRowBlocks, kInner>& p,
                                            const __nv_bfloat16* x) {
  add_tile_product(o, p, [&](uint32_t(&b)[4], int k, int c) { load_b<kD>(b, x, k * 8, c * 8); });
}

}  // namespace sbtrain::kernels
