// Operands of the bf16 product (mma.cuh) from tiles in shared memory (tile.cuh), by ldmatrix.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/primitives/lanes.cuh"
#include "kernels/primitives/tile.cuh"

namespace sbtrain::kernels {

// Four matrices [8, 8] of bf16: lane n passes the address of a row of 16 bytes, row n % 8 of matrix
// n / 8, and gets in r[i] the elements (lane / 4, 2 (lane % 4)..) of matrix i.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
// The same of the transposed matrices.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// The transposed of a matrix [8, 8] of bf16 that the lanes hold in this arrangement.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(y) : "r"(x));
  return y;
}

// Writes four matrices [8, 8] of bf16 in the same arrangement: lane n passes the address of row n %
// 8 of matrix n / 8. sm_90 and later.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// The address of chunk `lane_chunk` (0 or 1) of row `lane_row`, counted from row and col. These are
// multiples of 16, so one exclusive or moves the lane's address there: the part that depends on the
// lane is computed once for a tile.
template <int kCols>
__device__ __forceinline__ uint32_t fragment_address(const __nv_bfloat16* tile, int lane_row,
                                                     int lane_chunk, int row, int col) {
  const uint32_t lane = shared_address(tile) + 2 * tile_offset<kCols>(lane_row, lane_chunk);
  return (lane ^ (col % 64 * 2)) + (row * kCols + col / 64 * 64) * 2;
}

// A [16, 16] = tile[row.., col..]; row and col are multiples of 16 in all of these.
template <int kCols>
__device__ __forceinline__ void load_a(uint32_t (&a)[4], const __nv_bfloat16* tile, int row,
                                       int col) {
  ldmatrix_x4(a, fragment_address<kCols>(tile, lane() % 16, lane() / 16, row, col));
}
// A [16, 16] = tile[row.., col..]^T.
template <int kCols>
__device__ __forceinline__ void load_a_trans(uint32_t (&a)[4], const __nv_bfloat16* tile, int row,
                                             int col) {
  ldmatrix_x4_trans(
      a, fragment_address<kCols>(tile, lane() % 8 + lane() / 16 * 8, lane() / 8 % 2, row, col));
}
// Two B [16, 8], of rows row.. and row+8..: tile[row.., col..]^T, as in x * tile^T. b[0], b[1] are
// the first, b[2], b[3] the second.
template <int kCols>
__device__ __forceinline__ void load_b_trans(uint32_t (&b)[4], const __nv_bfloat16* tile, int row,
                                             int col) {
  ldmatrix_x4(
      b, fragment_address<kCols>(tile, lane() % 8 + lane() / 16 * 8, lane() / 8 % 2, row, col));
}
// Two B [16, 8], of columns col.. and col+8..: tile[row.., col..], as in x * tile.
template <int kCols>
__device__ __forceinline__ void load_b(uint32_t (&b)[4], const __nv_bfloat16* tile, int row,
                                       int col) {
  ldmatrix_x4_trans(b, fragment_address<kCols>(tile, lane() % 16, lane() / 16, row, col));
}

}  // namespace sbtrain::kernels
