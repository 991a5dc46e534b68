// Asynchronous copies and the tiles that they fill.
#include <set>
#include <tuple>

#include "gpu/device.h"
#include "kernels/primitives/thread_group.cuh"
#include "kernels/primitives/tile.cuh"

namespace sbtrain::test::tile_test {
namespace {

using namespace kernels;  // NOLINT: nearly every name here is from there
using Tile = GpuTest;

constexpr int kRows = 64;
constexpr int kThreads = 128;

// Loads a tile, and returns its shared memory and the places of its chunks.
template <int kCols>
__global__ void tile_kernel(uint16_t* tile_out, int* offsets, const __nv_bfloat16* global,
                            int64_t stride, int rows, int cols) {
  __shared__ __align__(128) __nv_bfloat16 tile[kRows * kCols];
  const BlockThreads<kThreads> group;
  auto* const bits = reinterpret_cast<uint16_t*>(tile);
  for (int i = group.thread(); i < kRows * kCols; i += kThreads) bits[i] = 0xffff;
  group.sync();
  load_tile<kRows, kCols>(group, tile, global, stride, rows, cols);
  cp_async_commit();
  cp_async_wait<0>();
  group.sync();
  for (int i = group.thread(); i < kRows * kCols; i += kThreads) tile_out[i] = bits[i];
  for (int i = group.thread(); i < kRows * kCols / 8; i += kThreads) {
    offsets[i] = tile_offset<kCols>(i / (kCols / 8), i % (kCols / 8));
  }
}

template <int kCols>
void check_tile(int rows, int cols) {
  const int stride = kCols + 24;
  std::vector<uint16_t> matrix(static_cast<size_t>(kRows * stride));
  for (size_t i = 0; i < matrix.size(); ++i) matrix[i] = static_cast<uint16_t>(i + 1);
  OnDevice<uint16_t> in(matrix), out(kRows * kCols);
  OnDevice<int> offsets(kRows * kCols / 8);
  tile_kernel<kCols><<<1, kThreads>>>(out.data(), offsets.data(),
                                      reinterpret_cast<const __nv_bfloat16*>(in.data()), stride,
                                      rows, cols);
  const std::vector<uint16_t> tile = out.values();
  const std::vector<int> at = offsets.values();
  const auto offset = [&](int row, int chunk) {
    return at[static_cast<size_t>(row * kCols / 8 + chunk)];
  };
  for (int row = 0; row < kRows; ++row) {
    for (int col = 0; col < kCols; ++col) {
      const uint16_t want =
          row < rows && col < cols ? matrix[static_cast<size_t>(row * stride + col)] : 0;
      ASSERT_EQ(tile[static_cast<size_t>(offset(row, col / 8) + col % 8)], want)
          << row << ", " << col << " of " << kCols;
    }
  }
  // A quarter of a warp reads or writes 8 chunks at once: those of 8 rows for fragments, or those
  // that neighbouring threads copy. They must lie in different banks.
  const auto banks = [&](auto chunk_of) {
    std::set<int> all;
    for (int i = 0; i < 8; ++i) {
      const auto [row, chunk] = chunk_of(i);
      all.insert(offset(row, chunk) % 64 / 8);
    }
    return all.size();
  };
  for (int row = 0; row < kRows; row += 8) {
    for (int chunk = 0; chunk < kCols / 8; ++chunk) {
      EXPECT_EQ(banks([&](int i) { return std::tuple(row + i, chunk); }), 8u) << row;
    }
    EXPECT_EQ(banks([&](int i) { return std::tuple(row + i / (kCols / 8), i % (kCols / 8)); }), 8u);
  }
}

TEST_F(Tile, IsCopiedWithZerosOutside) {
  for (const int rows : {kRows, kRows - 1, 1, 0}) {
    check_tile<32>(rows, 32);
    check_tile<32>(rows, 8);
    check_tile<64>(rows, 64);
    check_tile<64>(rows, 40);
    check_tile<128>(rows, 128);
    check_tile<128>(rows, 96);
  }
}

// The group is the second half of the block.
template <int kBytes>
__global__ void copy_kernel(char* out, const char* in) {
  __shared__ __align__(16) char shared[kBytes];
  if (threadIdx.x < 64) return;
  const NamedThreads<64> group{1, 64};
  copy_bytes<kBytes>(group, shared, in);
  cp_async_commit();
  cp_async_wait<0>();
  group.sync();
  for (int i = group.thread(); i < kBytes; i += 64) out[i] = shared[i];
}

template <int kBytes>
void check_copy() {
  std::vector<char> bytes(kBytes);
  for (int i = 0; i < kBytes; ++i)
    bytes[static_cast<size_t>(i)] = static_cast<char>(i * 37 + i / 256);
  OnDevice<char> in(bytes), out(kBytes);
  copy_kernel<kBytes><<<1, 128>>>(out.data(), in.data());
  EXPECT_EQ(out.values(), bytes) << kBytes;
}

TEST_F(Tile, BytesAreCopiedByAGroup) {
  check_copy<16>();
  check_copy<16 * 63>();
  check_copy<16 * 64>();
  check_copy<16 * 65>();
  check_copy<16 * 128>();
}

// Copies of 4 bytes, some of them zeros, in two groups of which one is waited for first.
__global__ void words_kernel(int* out, const int* in) {
  __shared__ int shared[64];
  const int i = static_cast<int>(threadIdx.x);
  shared[i] = shared[i + 32] = -1;
  __syncthreads();
  cp_async4(shared_address(shared + i), in + i, i % 3 != 0);
  cp_async_commit();
  cp_async4(shared_address(shared + i + 32), in + i + 32);
  cp_async_commit();
  cp_async_wait<1>();
  out[i] = shared[i];
  cp_async_wait<0>();
  out[i + 32] = shared[i + 32];
}

TEST_F(Tile, WordsAreCopiedInGroups) {
  std::vector<int> words(64);
  for (int i = 0; i < 64; ++i) words[static_cast<size_t>(i)] = 1000 + i;
  OnDevice<int> in(words), out(64);
  words_kernel<<<1, 32>>>(out.data(), in.data());
  const std::vector<int> got = out.values();
  for (int i = 0; i < 64; ++i) {
    EXPECT_EQ(got[static_cast<size_t>(i)], i < 32 && i % 3 == 0 ? 0 : 1000 + i) << i;
  }
}

}  // namespace
}  // namespace sbtrain::test::tile_test
