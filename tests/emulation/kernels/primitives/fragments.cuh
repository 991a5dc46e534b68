// Replaces stmatrix (emulation/emulator.h). The portable main loops, of which the Hopper ones share
// parts, name the other functions; none of these runs here, so they have no bodies.
#pragma once

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

template <int kCols>
void load_a(uint32_t (&a)[4], const __nv_bfloat16* tile, int row, int col);
template <int kCols>
void load_a_trans(uint32_t (&a)[4], const __nv_bfloat16* tile, int row, int col);
template <int kCols>
void load_b(uint32_t (&b)[4], const __nv_bfloat16* tile, int row, int col);
template <int kCols>
void load_b_trans(uint32_t (&b)[4], const __nv_bfloat16* tile, int row, int col);

}  // namespace sbtrain::kernels
