// Tiles of bf16 in shared memory: row-major [rows, kCols], kCols 32, 64, 128 or 256, in chunks of 8
// columns (16 bytes). The chunks of a row are permuted, so that neither copies nor fragments meet
// bank conflicts. Tiles are aligned to 128 bytes.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/primitives/async_copy.cuh"

namespace sbtrain::kernels {

// Where chunk `chunk` of row `row` lies, in elements. Eight rows of one chunk, and the chunks of
// one row, lie in different banks.
template <int kCols>
__device__ __forceinline__ int tile_offset(int row, int chunk) {
  static_assert(kCols == 32 || kCols == 64 || kCols == 128 || kCols == 256);
  const int permuted = kCols == 32 ? chunk ^ ((row >> 1) & 3) : chunk ^ (row & 7);
  return row * kCols + permuted * 8;
}

// Copies rows [0, rows) and columns [0, cols) of a global matrix to a tile of kRows rows, by all
// threads of a group; the rest of the tile becomes zero. cols and row_stride are multiples of 8.
// The copies are asynchronous and not committed.
template <int kRows, int kCols, typename Group>
__device__ __forceinline__ void load_tile(const Group& group, __nv_bfloat16* tile,
                                          const __nv_bfloat16* global, int64_t row_stride, int rows,
                                          int cols) {
  constexpr int kThreads = Group::kThreads;
  constexpr int kChunks = kCols / 8;
  static_assert(kThreads % kChunks == 0 && kRows * kChunks % kThreads == 0);
  constexpr int kStep = kThreads / kChunks;  // rows between two chunks of a thread
  const int first = group.thread() / kChunks;
  const int chunk = group.thread() % kChunks;
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

}  // namespace sbtrain::kernels
