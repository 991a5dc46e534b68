#include "gpu/device.h"
#include "kernels/primitives/fragments.cuh"

namespace sbtrain::test::fragments_test {
namespace {

using namespace kernels;  // NOLINT: nearly every name here is from there
using Fragments = GpuTest;

constexpr int kRows = 64;

enum class Load { kA, kATransposed, kB, kBTransposed };

// The bits of each element of the tile are its number, row * kCols + column.
template <int kCols>
__global__ void fragments_kernel(uint32_t* out, Load load, int row, int col) {
  __shared__ __align__(128) __nv_bfloat16 tile[kRows * kCols];
  auto* const bits = reinterpret_cast<uint16_t*>(tile);
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kCols; i += 32) {
    const int r = i / kCols, c = i % kCols;
    bits[tile_offset<kCols>(r, c / 8) + c % 8] = static_cast<uint16_t>(i);
  }
  __syncwarp();
  uint32_t x[4];
  if (load == Load::kA) load_a<kCols>(x, tile, row, col);
  if (load == Load::kATransposed) load_a_trans<kCols>(x, tile, row, col);
  if (load == Load::kB) load_b<kCols>(x, tile, row, col);
  if (load == Load::kBTransposed) load_b_trans<kCols>(x, tile, row, col);
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = x[i];
}

struct At {
  int row, col;
};
// The element of the operand that half `half` of register i holds (mma.cuh).
At of_a(int lane, int i, int half) {
  return {lane / 4 + i % 2 * 8, lane % 4 * 2 + i / 2 * 8 + half};
}
At of_b(int lane, int i, int half) {  // of two blocks of 8 columns side by side
  return {lane % 4 * 2 + i % 2 * 8 + half, lane / 4 + i / 2 * 8};
}

template <int kCols>
void check(Load load) {
  for (int row = 0; row < kRows; row += 16) {
    for (int col = 0; col < kCols; col += 16) {
      OnDevice<uint32_t> out(32 * 4);
      fragments_kernel<kCols><<<1, 32>>>(out.data(), load, row, col);
      const std::vector<uint32_t> got = out.values();
      for (int n = 0; n < 32 * 4 * 2; ++n) {
        const int lane = n / 8, i = n / 2 % 4, half = n % 2;
        const bool is_a = load == Load::kA || load == Load::kATransposed;
        At at = is_a ? of_a(lane, i, half) : of_b(lane, i, half);
        if (load == Load::kATransposed || load == Load::kBTransposed) at = {at.col, at.row};
        const uint32_t element = got[static_cast<size_t>(n / 2)] >> (16 * half) & 0xffff;
        ASSERT_EQ(element, static_cast<uint32_t>((row + at.row) * kCols + col + at.col))
            << "load " << static_cast<int>(load) << ", tile " << row << ", " << col << " of "
            << kCols << ", lane " << lane << ", register " << i << ", half " << half;
      }
    }
  }
}

TEST_F(Fragments, AreOperandsOfTheProduct) {
  for (const Load load : {Load::kA, Load::kATransposed, Load::kB, Load::kBTransposed}) {
    check<32>(load);
    check<64>(load);
    check<128>(load);
  }
}

}  // namespace
}  // namespace sbtrain::test::fragments_test
