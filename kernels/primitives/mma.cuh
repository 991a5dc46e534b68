// What the attention kernels are made of, sm_80 and up: asynchronous copies of swizzled bf16 tiles
// to shared memory, fragments of them, and the m16n8k16 tensor core instruction.
//
// A tile is row-major [rows, kCols] bf16, kCols 32, 64 or 128, in chunks of 8 columns (16 bytes).
// The chunks of a row are permuted (tile_offset), so that neither copies nor fragments meet bank
// conflicts. Lanes hold, g = lane / 4 and c = 2 (lane % 4):
//   A [16, 16]  a[0] (g, c..c+1)  a[1] (g+8, c..)  a[2] (g, c+8..)  a[3] (g+8, c+8..)
//   B [16, 8]   b[0] (c..c+1, g)  b[1] (c+8.., g)
//   C [16, 8]   c[0], c[1] (g, c..c+1)   c[2], c[3] (g+8, c..c+1)
// Two neighbouring C, rounded (pack_bf16), are an A: see accumulator_as_a.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace sbtrain::kernels {

// ---- Asynchronous copies --------------------------------------------------------------------

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes from global to shared memory, zeros where not `valid` (`global` is not read then, but
// must be an address). Both aligned to 16.
__device__ __forceinline__ void cp_async16(uint32_t shared, const void* global, bool valid = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}
// 4 bytes, likewise.
__device__ __forceinline__ void cp_async4(uint32_t shared, const void* global, bool valid = true) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(shared), "l"(global),
               "r"(valid ? 4 : 0)
               : "memory");
}
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}
// Waits until at most kPending of this thread's groups are under way. What other threads copied
// is there after a __syncthreads() besides.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// ---- Tiles ------------------------------------------------------------------------------------

// Where chunk `chunk` of row `row` lies, in elements. Eight rows of one chunk, and the chunks of
// one row, lie in different banks.
template <int kCols>
__device__ __forceinline__ int tile_offset(int row, int chunk) {
  static_assert(kCols == 32 || kCols == 64 || kCols == 128);
  const int permuted = kCols == 32 ? chunk ^ ((row >> 1) & 3) : chunk ^ (row & 7);
  return row * kCols + permuted * 8;
}

// Copies rows [0, rows) and columns [0, cols) of a global matrix to a tile of kRows rows; the rest
// of the tile becomes zero. cols, row_stride are multiples of 8. Asynchronous, not committed.
template <int kRows, int kCols, int kThreads>
__device__ __forceinline__ void load_tile(__nv_bfloat16* tile, const __nv_bfloat16* global,
                                          int64_t row_stride, int rows, int cols) {
  constexpr int kChunks = kCols / 8;
  static_assert(kThreads % kChunks == 0 && kRows * kChunks % kThreads == 0);
  constexpr int kStep = kThreads / kChunks;  // rows between two chunks of a thread
  const int first = static_cast<int>(threadIdx.x) / kChunks;
  const int chunk = static_cast<int>(threadIdx.x) % kChunks;
  const bool in_cols = chunk * 8 < cols;
  const __nv_bfloat16* source = global + first * row_stride + chunk * 8;
#pragma unroll
  for (int n = 0; n < kRows / kStep; ++n) {
    const int row = first + n * kStep;
    const bool valid = in_cols && row < rows;
    cp_async16(shared_address(tile + tile_offset<kCols>(row, chunk)),
               valid ? source + n * kStep * row_stride : global, valid);
  }
}

// ---- Fragments --------------------------------------------------------------------------------

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Of chunk `lane_chunk` (0 or 1) of row `lane_row` behind row and col. These are multiples of 16,
// so that one exclusive or takes the lane there: what depends on the lane is computed once for a
// tile. Tiles are aligned to 128 bytes.
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
  const int lane = static_cast<int>(threadIdx.x) % 32;
  ldmatrix_x4(a, fragment_address<kCols>(tile, lane % 16, lane / 16, row, col));
}
// A [16, 16] = tile[row.., col..]^T.
template <int kCols>
__device__ __forceinline__ void load_a_trans(uint32_t (&a)[4], const __nv_bfloat16* tile, int row,
                                             int col) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  ldmatrix_x4_trans(
      a, fragment_address<kCols>(tile, lane % 8 + lane / 16 * 8, lane / 8 % 2, row, col));
}
// Two B [16, 8], of rows row.. and row+8..: tile[row.., col..]^T, as in x * tile^T. b[0], b[1] are
// the first, b[2], b[3] the second.
template <int kCols>
__device__ __forceinline__ void load_b_trans(uint32_t (&b)[4], const __nv_bfloat16* tile, int row,
                                             int col) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  ldmatrix_x4(b, fragment_address<kCols>(tile, lane % 8 + lane / 16 * 8, lane / 8 % 2, row, col));
}
// Two B [16, 8], of columns col.. and col+8..: tile[row.., col..], as in x * tile.
template <int kCols>
__device__ __forceinline__ void load_b(uint32_t (&b)[4], const __nv_bfloat16* tile, int row,
                                       int col) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  ldmatrix_x4_trans(b, fragment_address<kCols>(tile, lane % 16, lane / 16, row, col));
}

// ---- Tensor core ------------------------------------------------------------------------------

// c += a b.
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&c)[4], const uint32_t (&a)[4],
                                                  uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two floats, rounded, the first in the low half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// The A [16, 16] of two C [16, 8] side by side, rounded.
__device__ __forceinline__ void accumulator_as_a(uint32_t (&a)[4], const float (&left)[4],
                                                 const float (&right)[4]) {
  a[0] = pack_bf16(left[0], left[1]);
  a[1] = pack_bf16(left[2], left[3]);
  a[2] = pack_bf16(right[0], right[1]);
  a[3] = pack_bf16(right[2], right[3]);
}

}  // namespace sbtrain::kernels
