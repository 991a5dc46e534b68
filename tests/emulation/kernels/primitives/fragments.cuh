// Replaces ldmatrix, stmatrix and movmatrix (emulation/emulator.h).
#pragma once

#include <algorithm>
#include <cstring>

#include "kernels/primitives/lanes.cuh"
#include "kernels/primitives/tile.cuh"

namespace sbtrain::kernels {

inline void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
  const uint64_t* const rows = emulation::exchange(address);
  for (int matrix = 0; matrix < 4; ++matrix) {
    std::memcpy(memory + rows[8 * matrix + lane() / 4] + 4 * quad_lane(), &r[matrix], 4);
  }
}

inline uint32_t transpose_8x8(uint32_t x) {
  const uint64_t* const all = emulation::exchange(x);
  const auto element = [&](int row, int col) {
    return static_cast<uint32_t>(all[4 * row + col / 2]) >> 16 * (col % 2) & 0xffff;
  };
  const int row = lane() / 4, col = 2 * quad_lane();
  return element(col, row) | element(col + 1, row) << 16;
}

// Matrix n of four [8, 8], whose rows lie where lanes 8 n to 8 n + 7 say, or its transposed.
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address, bool transposed) {
  uint64_t rows[32];
  std::copy_n(emulation::exchange(address), 32, rows);
  const auto element = [&](int matrix, int row, int col) {
    uint16_t x;
    std::memcpy(&x, memory + rows[8 * matrix + row] + 2 * col, 2);
    return uint32_t{x};
  };
  const int row = lane() / 4, col = 2 * quad_lane();
  for (int matrix = 0; matrix < 4; ++matrix) {
    r[matrix] = transposed ? element(matrix, col, row) | element(matrix, col + 1, row) << 16
                           : element(matrix, row, col) | element(matrix, row, col + 1) << 16;
  }
}

// Where these lie is said by the true header.
template <int kCols>
uint32_t chunk_address(const __nv_bfloat16* tile, int row, int col) {
  return shared_address(tile + tile_offset<kCols>(row, col / 8));
}
template <int kCols>
void load_a(uint32_t (&a)[4], const __nv_bfloat16* tile, int row, int col) {
  const int n = lane();
  ldmatrix_x4(a, chunk_address<kCols>(tile, row + n % 16, col + n / 16 * 8), false);
}
template <int kCols>
void load_a_trans(uint32_t (&a)[4], const __nv_bfloat16* tile, int row, int col) {
  const int n = lane();
  ldmatrix_x4(a, chunk_address<kCols>(tile, row + n % 8 + n / 16 * 8, col + n / 8 % 2 * 8), true);
}
template <int kCols>
void load_b_trans(uint32_t (&b)[4], const __nv_bfloat16* tile, int row, int col) {
  const int n = lane();
  ldmatrix_x4(b, chunk_address<kCols>(tile, row + n % 8 + n / 16 * 8, col + n / 8 % 2 * 8), false);
}
template <int kCols>
void load_b(uint32_t (&b)[4], const __nv_bfloat16* tile, int row, int col) {
  const int n = lane();
  ldmatrix_x4(b, chunk_address<kCols>(tile, row + n % 16, col + n / 16 * 8), true);
}

}  // namespace sbtrain::kernels
