// The f32 accumulators of one warp's product: blocks of [16, 8] side by side (mma.cuh).
#pragma once

#include "kernels/primitives/lanes.cuh"

namespace sbtrain::kernels {

// Row and column of the lane's first element. Its rows are lane_row() + 8 i, its columns
// lane_col() + 8 c and the one after each.
__device__ __forceinline__ int lane_row() {
  return lane() / 4;
}
__device__ __forceinline__ int lane_col() {
  return quad_lane() * 2;
}

// [16 * kRowBlocks, 8 * kColBlocks].
template <int kRowBlocks, int kColBlocks>
struct Accumulator {
  static constexpr int kRows = 2 * kRowBlocks;  // of a lane, and columns
  static constexpr int kCols = 2 * kColBlocks;
  float at[kRowBlocks][kColBlocks][4];

  // Element t of the lane's row i, in the order of its columns.
  __device__ __forceinline__ float& of_row(int i, int t) {
    return at[i / 2][t / 2][i % 2 * 2 + t % 2];
  }
  __device__ __forceinline__ const float& of_row(int i, int t) const {
    return at[i / 2][t / 2][i % 2 * 2 + t % 2];
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
      for (int c = 0; c < kColBlocks; ++c) {
#pragma unroll
        for (int i = 0; i < 4; ++i) at[r][c][i] = 0.0f;
      }
    }
  }
  // element(value, row, col) of everything this lane holds.
  template <typename Body>
  __device__ __forceinline__ void for_each(Body&& body) {
    const int row = kernels::lane_row();
    const int col = lane_col();
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
      for (int c = 0; c < kColBlocks; ++c) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          body(at[r][c][i], RowCol{r * 16 + row + i / 2 * 8, c * 8 + col + i % 2, r * 2 + i / 2});
        }
      }
    }
  }
  struct RowCol {
    int row, col;
    int lane_row;  // which of the lane's rows; known at compile time
  };
};

}  // namespace sbtrain::kernels
