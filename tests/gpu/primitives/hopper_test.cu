// The primitives of Hopper's kernels: copies by the copy engine, of permuted keys too, and the
// products of a warpgroup with each kind of operand.
#include <array>
#include <numeric>

#include "gpu/device.h"
#include "kernels/attention/score_stickbreaking.cuh"
#include "kernels/primitives/fragments.cuh"
#include "kernels/primitives/mma.cuh"
#include "kernels/primitives/pipeline.cuh"
#include "kernels/primitives/tensor_map.h"
#include "kernels/primitives/tma.cuh"
#include "kernels/primitives/warpgroup.cuh"
#include "kernels/primitives/wgmma.cuh"

namespace sbtrain::test::hopper_test {
namespace {

using namespace kernels;  // NOLINT: nearly every name here is from there

class Hopper : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    int major = 0;
    check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    if (major != 9) GTEST_SKIP() << "the GPU is not of compute capability 9.0";
  }
};

constexpr int kAlignment = 1024;
[[maybe_unused]] __device__ unsigned char* aligned(unsigned char* memory) {
  return memory + (kAlignment - shared_address(memory) % kAlignment) % kAlignment;
}

// Small integers, so that products are exact, different in every row and column.
int number(int row, int col) {
  return (row * 7 + col * 3) % 15 - 7;
}
std::vector<__nv_bfloat16> matrix(int rows, int cols) {
  std::vector<__nv_bfloat16> x;
  for (int n = 0; n < rows * cols; ++n) {
    x.push_back(__float2bfloat16(static_cast<float>(number(n / cols, n % cols))));
  }
  return x;
}

// Where element (row, col) of a tile of kRows rows of kCols columns lies: panels of up to 64
// columns, whose chunks of 16 bytes are swizzled.
template <int kRows, int kCols>
constexpr int swizzled(int row, int col) {
  constexpr int kPanel = kCols < 64 ? kCols : 64;
  const int chunk = col % kPanel / 8;
  const int place = kPanel == 64 ? chunk ^ (row & 7) : chunk ^ (row >> 1 & 3);
  return col / kPanel * (kRows * kPanel) + row * kPanel + place * 8 + col % 8;
}

// ---- Copies -------------------------------------------------------------------------------------

constexpr int kTokens = 300, kHeads = 2;

template <int kRows, int kCols, bool kPermuted>
__global__ void copy_kernel(__nv_bfloat16* out, const __grid_constant__ CUtensorMap map, int first,
                            int head) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char memory[];
  __shared__ Mbarrier barrier;
  auto* tile = reinterpret_cast<__nv_bfloat16*>(aligned(memory));
  constexpr int kPanel = kCols < 64 ? kCols : 64;
  if (threadIdx.x == 0) {
    barrier.init(1);
    fence_mbarrier_init();
    barrier.arrive_and_expect(kRows * kCols * 2);
    for (int col = 0; col < kCols; col += kPanel) {
      if constexpr (kPermuted) {
        tma_load(tile + col * kRows, map, barrier, col, first, 0, 0, head);
      } else {
        tma_load(tile + col * kRows, map, barrier, col, first, head);
      }
    }
  }
  __syncthreads();
  barrier.wait(0);
  for (int n = static_cast<int>(threadIdx.x); n < kRows * kCols; n += 128) out[n] = tile[n];
#endif
}

template <int kRows, int kCols, bool kPermuted>
void expect_copies(int first) {
  constexpr int kStride = kHeads * kCols + 8;
  constexpr int kPanel = kCols < 64 ? kCols : 64;
  OnDevice<__nv_bfloat16> x(matrix(kTokens, kStride)), out(kRows * kCols);
  CUtensorMap map;
  if constexpr (kPermuted) {
    map = tensor_map(TensorBox<5>{.data = x.data(),
                                  .shape = {kCols, kTokens, 4, kRows / 8, kHeads},
                                  .strides = {kStride, kRows / 4 * kStride, 2 * kStride, kCols},
                                  .box = {kPanel, 2, 4, kRows / 8, 1}});
  } else {
    map = tensor_map(TensorBox<3>{.data = x.data(),
                                  .shape = {kCols, kTokens, kHeads},
                                  .strides = {kStride, kCols},
                                  .box = {kPanel, kRows, 1}});
  }
  constexpr int kBytes = kRows * kCols * 2 + kAlignment;
  check_cuda(cudaFuncSetAttribute(copy_kernel<kRows, kCols, kPermuted>,
                                  cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  copy_kernel<kRows, kCols, kPermuted><<<1, 128, kBytes>>>(out.data(), map, first, 1);
  const std::vector<__nv_bfloat16> got = out.values();
  for (int n = 0; n < kRows * kCols; ++n) {
    const int row = n / kCols, col = n % kCols;
    int token = first + row;
    if (kPermuted) token = first + kRows / 4 * (row % 8 / 2) + row / 8 * 2 + row % 2;
    const int want = token < kTokens ? number(token, kCols + col) : 0;
    ASSERT_EQ(__bfloat162float(got[static_cast<size_t>(swizzled<kRows, kCols>(row, col))]),
              static_cast<float>(want))
        << "row " << row << ", column " << col << ", from token " << first;
  }
}

TEST_F(Hopper, CopiesTokensAndZerosBeyondThem) {
  for (const int first : {0, 7, 128, kTokens - 70}) {
    expect_copies<128, 32, false>(first);
    expect_copies<128, 64, false>(first);
    expect_copies<64, 128, false>(first);
  }
}

TEST_F(Hopper, CopiesPermutedKeysFromAnyToken) {
  for (const int first : {0, 7, 64, kTokens - 128}) {
    expect_copies<64, 32, true>(first);
    expect_copies<64, 64, true>(first);
    expect_copies<64, 128, true>(first);
    expect_copies<128, 32, true>(first);
    expect_copies<128, 64, true>(first);
    expect_copies<128, 128, true>(first);
  }
}

// Each lane of one warp copies a row, of which the sizes differ.
__global__ void bulk_kernel(int4* out, const int4* from, int rows, int row_vectors) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ Mbarrier barrier;
  auto* copied = reinterpret_cast<int4*>(memory);
  const int row = static_cast<int>(threadIdx.x);
  for (int i = row; i < rows * row_vectors; i += 32) copied[i] = make_int4(-1, -1, -1, -1);
  fence_async_proxy();
  if (row == 0) {
    barrier.init(1);
    fence_mbarrier_init();
    int vectors = 0;
    for (int i = 0; i < rows; ++i) vectors += i % row_vectors + 1;
    barrier.arrive_and_expect(16 * vectors);
  }
  __syncwarp();
  if (row < rows) {
    bulk_load(copied + row * row_vectors, from + row * row_vectors, 16 * (row % row_vectors + 1),
              barrier);
  }
  barrier.wait(0);
  for (int i = row; i < rows * row_vectors; i += 32) out[i] = copied[i];
#endif
}

TEST_F(Hopper, CopiesBytesInARow) {
  constexpr int kRows = 29, kVectors = 7;
  std::vector<int4> from;
  for (int i = 0; i < kRows * kVectors; ++i) {
    from.push_back({4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3});
  }
  OnDevice<int4> x(from), y(from.size());
  bulk_kernel<<<1, 32, sizeof(int4) * from.size()>>>(y.data(), x.data(), kRows, kVectors);
  const std::vector<int4> copied = y.values();
  for (int i = 0; i < kRows * kVectors; ++i) {
    const int4 got = copied[static_cast<size_t>(i)];
    const bool wanted = i % kVectors <= i / kVectors % kVectors;
    const int first = wanted ? 4 * i : -1, last = wanted ? 4 * i + 3 : -1;
    EXPECT_EQ(got.x, first) << i;
    EXPECT_EQ(got.w, last) << i;
  }
}

// Every block adds its numbers to the same row, chunk after chunk through two places of shared
// memory, each chunk by one thread. What it has added it sees afterwards.
constexpr int kChunk = 128, kChunks = 5;
__global__ void bulk_add_kernel(float* sums, float* seen) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ __align__(16) float places[2][kChunk];
  const int thread = static_cast<int>(threadIdx.x);
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    float* place = places[chunk % 2];
    if (thread == 0) bulk_wait_read<1>();
    __syncthreads();
    place[thread] = static_cast<float>((blockIdx.x + 1) * (chunk * kChunk + thread));
    fence_async_proxy();
    __syncthreads();
    if (thread > 0) continue;
    bulk_add(sums + chunk * kChunk, place, kChunk * 4);
    bulk_commit();
  }
  if (thread > 0) return;
  bulk_wait<0>();
  seen[blockIdx.x] = sums[kChunks * kChunk - 1];
#endif
}

TEST_F(Hopper, AddsNumbersInARow) {
  constexpr int kBlocks = 20;
  constexpr int kFactors = kBlocks * (kBlocks + 1) / 2;  // all sums are exact
  OnDevice<float> sums(std::vector<float>(kChunks * kChunk, 1.0f)), seen(kBlocks);
  bulk_add_kernel<<<kBlocks, kChunk>>>(sums.data(), seen.data());
  const std::vector<float> got = sums.values();
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i], 1.0f + kFactors * static_cast<float>(i)) << i;
  }
  const std::vector<float> last = seen.values();
  for (size_t block = 0; block < last.size(); ++block) {
    EXPECT_GE(last[block], 1.0f + static_cast<float>((block + 1) * (got.size() - 1))) << block;
  }
}

// ---- A pipeline of phases -----------------------------------------------------------------------

// One warp fills a pipeline of two stages with numbers, the other one adds them up.
__global__ void pipeline_kernel(int* sum, int count) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ Pipeline<2> pipeline;
  __shared__ int numbers[2];
  if (threadIdx.x == 0) {
    pipeline.init(1, 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  PipelineState<2> state;
  int total = 0;
  for (int n = 1; n <= count; ++n) {
    if (threadIdx.x < 32) {
      Mbarrier& full = pipeline.acquire(state);
      if (elect_one()) {
        numbers[state.stage()] = n;
        full.arrive();
      }
      __syncwarp();
      state.advance();
    } else {
      pipeline.wait(state);
      total += numbers[state.stage()];
      pipeline.release_and_advance(state);
    }
  }
  if (threadIdx.x == 32) *sum = total;
#endif
}

TEST_F(Hopper, BarriersPassTheStagesOfAPipelineOn) {
  OnDevice<int> sum(1);
  pipeline_kernel<<<1, 64>>>(sum.data(), 1001);
  EXPECT_EQ(sum.values()[0], 1001 * 1002 / 2);
}

// ---- Products -----------------------------------------------------------------------------------

template <int kRows, int kCols>
__device__ void fill_tile(__nv_bfloat16* tile, const __nv_bfloat16* x) {
  for (int n = static_cast<int>(threadIdx.x); n < kRows * kCols; n += 128) {
    tile[swizzled<kRows, kCols>(n / kCols, n % kCols)] = x[n];
  }
}
template <int kCols>
__device__ void write(float* out, WarpgroupAccumulator<kCols>& c) {
  const int first = static_cast<int>(threadIdx.x) / 32 * 16;
  c.for_each([&](float x, auto at) { out[(first + at.row) * kCols + at.col] = x; });
}

// out [64, kN] = x [64, kInner] y [kN, kInner]^T, twice: with `add` the second time.
template <int kN, int kInner>
__global__ void rows_kernel(float* out, const __nv_bfloat16* x, const __nv_bfloat16* y) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char memory[];
  auto* const a = reinterpret_cast<__nv_bfloat16*>(aligned(memory));
  __nv_bfloat16* const b = a + 64 * kInner;
  fill_tile<64, kInner>(a, x);
  fill_tile<kN, kInner>(b, y);
  fence_async_proxy();
  __syncthreads();
  WarpgroupAccumulator<kN> c;
  const TileOperand<64, kInner, TileUse::kRows> left(a);
  const TileOperand<kN, kInner, TileUse::kRows> right(b);
  c.pin();
  wgmma_fence();
  issue_product<kInner>(c, left, right);
  issue_product<kInner>(c, left, right, true);
  wgmma_commit();
  wait_for_products<0>();
  c.pin();
  write(out, c);
#endif
}

// out [64, kN] = x [64, 64] y [64, kN], with x in registers, or with x^T [64, 64] and y in shared
// memory.
template <int kN, bool kInRegisters>
__global__ void columns_kernel(float* out, const __nv_bfloat16* x, const __nv_bfloat16* y) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char memory[];
  auto* const a = reinterpret_cast<__nv_bfloat16*>(aligned(memory));
  __nv_bfloat16* const b = a + 64 * 64;
  fill_tile<64, 64>(a, x);
  fill_tile<64, kN>(b, y);
  fence_async_proxy();
  __syncthreads();
  WarpgroupAccumulator<kN> c;
  WarpgroupOperand<64> operand;
  for (int k = 0; k < 4; ++k) {
    load_a<64>(operand.at[k], a, static_cast<int>(threadIdx.x) / 32 * 16, k * 16);
  }
  c.clear();
  c.pin();
  operand.pin();
  wgmma_fence();
  const TileOperand<64, kN, TileUse::kColumns> right(b);
  if constexpr (kInRegisters) {
    issue_product<64>(c, operand, right);
  } else {
    issue_product<64>(c, TileOperand<64, 64, TileUse::kColumns>(a), right, true);
  }
  wgmma_commit();
  wait_for_products<0>();
  c.pin();
  write(out, c);
#endif
}

template <typename Kernel, typename Left, typename Right>
void expect_product(Kernel kernel, int n, int inner, std::array<int, 4> shapes, int times,
                    Left&& left, Right&& right) {
  OnDevice<__nv_bfloat16> x(matrix(shapes[0], shapes[1])), y(matrix(shapes[2], shapes[3]));
  OnDevice<float> out(static_cast<size_t>(64 * n));
  const int bytes = 2 * (shapes[0] * shapes[1] + shapes[2] * shapes[3]) + kAlignment;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  kernel<<<1, 128, static_cast<size_t>(bytes)>>>(out.data(), x.data(), y.data());
  const std::vector<float> got = out.values();
  for (int i = 0; i < 64 * n; ++i) {
    int want = 0;
    for (int k = 0; k < inner; ++k) want += left(i / n, k) * right(k, i % n);
    ASSERT_EQ(got[static_cast<size_t>(i)], static_cast<float>(times * want))
        << i / n << ", " << i % n << " of " << n << ", inner dimension " << inner;
  }
}

template <int kN, int kInner>
void expect_rows() {
  expect_product(rows_kernel<kN, kInner>, kN, kInner, {64, kInner, kN, kInner}, 2, number,
                 [](int k, int col) { return number(col, k); });
}
template <int kN>
void expect_columns() {
  const std::array<int, 4> shapes = {64, 64, 64, kN};
  expect_product(columns_kernel<kN, true>, kN, 64, shapes, 1, number, number);
  expect_product(
      columns_kernel<kN, false>, kN, 64, shapes, 1, [](int row, int k) { return number(k, row); },
      number);
}

TEST_F(Hopper, MultipliesRowsByRows) {
  expect_rows<64, 32>();
  expect_rows<64, 64>();
  expect_rows<64, 128>();
  expect_rows<128, 32>();
  expect_rows<128, 64>();
  expect_rows<128, 128>();
}

TEST_F(Hopper, MultipliesByColumns) {
  expect_columns<32>();
  expect_columns<64>();
  expect_columns<128>();
}

// ---- Matrices stored by a warp ------------------------------------------------------------------

__global__ void stmatrix_kernel(__nv_bfloat16* out) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ __align__(16) __nv_bfloat16 tile[16 * 16];
  const int i = static_cast<int>(threadIdx.x);
  uint32_t r[4];
  for (int n = 0; n < 4; ++n) {  // matrix n: rows 8 (n % 2), columns 8 (n / 2)
    const int row = i / 4 + n % 2 * 8, col = i % 4 * 2 + n / 2 * 8;
    r[n] = pack_bf16(static_cast<float>(row * 16 + col), static_cast<float>(row * 16 + col + 1));
  }
  stmatrix_x4(shared_address(tile + i % 16 * 16 + i / 16 * 8), r);
  __syncwarp();
  for (int n = i; n < 256; n += 32) out[n] = tile[n];
#endif
}

TEST_F(Hopper, StoresMatrices) {
  OnDevice<__nv_bfloat16> out(256);
  stmatrix_kernel<<<1, 32>>>(out.data());
  const std::vector<__nv_bfloat16> got = out.values();
  for (int n = 0; n < 256; ++n) {
    EXPECT_EQ(__bfloat162float(got[static_cast<size_t>(n)]), static_cast<float>(n)) << n;
  }
}

}  // namespace
}  // namespace sbtrain::test::hopper_test
