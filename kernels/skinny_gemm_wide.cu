// Products of 9 to 64 rows.
#include "kernels/device_attribute.h"
#include "kernels/primitives/async_copy.cuh"
#include "kernels/primitives/dependent_launch.cuh"
#include "kernels/primitives/stamps.cuh"
#include "kernels/skinny_gemm.cuh"

namespace sbtrain::kernels {

extern __shared__ __align__(128) unsigned char memory[];

namespace {

using namespace products;

// Four outputs of one row.
__device__ __forceinline__ void store_outputs(const SkinnyGemm& p, int64_t row, int64_t output,
                                              const float (&y)[4], bool vectors) {
  if (!vectors) {
#pragma unroll
    for (int i = 0; i < 4; ++i) store_output(p, row, output + i, y[i]);
    return;
  }
  if (output >= p.n) return;
  const int64_t at = row * p.y.stride + output;
  if (p.type == Type::kF32) {
    *reinterpret_cast<float4*>(static_cast<float*>(p.y.data) + at) = {y[0], y[1], y[2], y[3]};
  } else {
    *reinterpret_cast<uint2*>(static_cast<bf16*>(p.y.data) + at) = {pack_bf16(y[0], y[1]),
                                                                    pack_bf16(y[2], y[3])};
  }
}
// What is added to four outputs of one row, of which bf16 in vectors can be loaded ahead.
class Residuals {
 public:
  __device__ __forceinline__ void load(const SkinnyGemm& p, int64_t row, int64_t output,
                                       bool vectors) {
    if (vectors && p.type == Type::kBF16 && p.residual.data != nullptr && output < p.n) {
      pairs_ = *reinterpret_cast<const uint2*>(static_cast<const bf16*>(p.residual.data) +
                                               row * p.residual.stride + output);
    }
  }
  __device__ __forceinline__ void add(const SkinnyGemm& p, int64_t row, int64_t output,
                                      bool vectors, float (&y)[4]) const {
    if (vectors && p.type == Type::kBF16) {
      const float2 low = floats_of(pairs_.x);
      const float2 high = floats_of(pairs_.y);
      y[0] += low.x, y[1] += low.y, y[2] += high.x, y[3] += high.y;
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] += load_residual(p, row, output + i);
  }

 private:
  uint2 pairs_ = {0, 0};
};

template <int kOutputTiles, int kRowTiles>
struct WideSizes {
  static constexpr int kOutputs = kTileOutputs * kOutputTiles;
  static constexpr int kRows = kTileRows * kRowTiles;
  static constexpr int kRowBytes = 2 * kChunk;
  static constexpr int kSlotBytes = (kOutputs + kRows) * kRowBytes;  // one chunk
  static constexpr int kSlots = std::min(8, (27 << 10) / kSlotBytes);
  static constexpr int kWarpBytes = kSlots * kSlotBytes;
  // So that neither writing nor reading the sums has bank conflicts.
  static constexpr int kStride = kOutputs + 4;
  static_assert(kRows * kStride * 4 <= kWarpBytes && kSlots >= 2);
  static constexpr int kSharedBytes = kWarps * kWarpBytes;
  // Fours of outputs of all rows, for each thread.
  static constexpr int kFours = (kRows * kOutputs / 4 + kThreads - 1) / kThreads;
};

// What skinny_gemm_kernel does, with the same bits, where there are more instructions to save: each
// copy is of vectors whose places differ from one chunk to the next by a constant. Each warp has a
// ring of slots for one chunk of all rows of w and x. Block (i, j) has the j-th kRows rows of x.
template <int kOutputTiles, int kRowTiles>
__global__ void __launch_bounds__(kThreads, 1)
    skinny_gemm_wide_kernel(const __grid_constant__ SkinnyGemm p, int of_warp, bool vectors) {
  using S = WideSizes<kOutputTiles, kRowTiles>;
  Stamps stamps;
  stamps.take(0);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / kChunkVectors;
  const int q = lane % kChunkVectors;
  const int64_t first_row = int64_t{blockIdx.y} * S::kRows;
  const int rows = static_cast<int>(min(int64_t{S::kRows}, p.rows - first_row));
  const int64_t first_tile = int64_t{blockIdx.x} * kOutputTiles;
  const int first_chunk = warp * of_warp;
  const int chunks = max(0, min(of_warp, static_cast<int>(p.k) / kChunk - first_chunk));
  let_next_kernel_begin();

  // Each lane copies 16 bytes of every eighth row. Rows beyond the last are like it; what comes of
  // them is not stored. Bytes count from the first row of the matrix.
  int64_t w_rows[2 * kOutputTiles];
#pragma unroll
  for (int i = 0; i < 2 * kOutputTiles; ++i) {
    const int64_t tile = first_tile + i / 2;
    const int64_t output = p.swiglu ? kHalf * tile + g : kTileOutputs * tile + i % 2 * kHalf + g;
    const int64_t row = min(output, p.n - 1) + (p.swiglu && i % 2 == 1 ? p.n : 0);
    w_rows[i] = row * p.w.stride;
  }
  int x_rows[kRowTiles];
#pragma unroll
  for (int j = 0; j < kRowTiles; ++j) {
    x_rows[j] = min(kTileRows * j + g, rows - 1) * static_cast<int>(p.x.stride);
  }
  unsigned char* const ring = memory + warp * S::kWarpBytes;
  const uint32_t to = shared_address(ring) + 16 * lane;
  const bf16* w = p.w.data + first_chunk * kChunk + 8 * q;
  const bf16* x = p.x.row(first_row) + first_chunk * kChunk + 8 * q;
  const auto copy_w = [&](int slot) {
#pragma unroll
    for (int i = 0; i < 2 * kOutputTiles; ++i) {
      cp_async16(to + slot * S::kSlotBytes + i * kHalf * S::kRowBytes, w + w_rows[i]);
    }
    w += kChunk;
  };
  const auto copy_x = [&](int slot) {
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
      cp_async16(to + slot * S::kSlotBytes + (S::kOutputs + j * kTileRows) * S::kRowBytes,
                 x + x_rows[j]);
    }
    x += kChunk;
  };
#pragma unroll 1
  for (int slot = 0; slot < S::kSlots; ++slot) {
    if (slot < chunks) copy_w(slot);
    cp_async_commit();
  }
  wait_for_previous_kernel();
  stamps.take(1);
#pragma unroll 1
  for (int slot = 0; slot < S::kSlots; ++slot) {
    if (slot < chunks) copy_x(slot);
    cp_async_commit();
  }

  // Of the outputs that this thread stores, which take long to arrive.
  constexpr int kFoursOfRow = 4 * kOutputTiles;
  Residuals residuals[S::kFours];
#pragma unroll
  for (int j = 0; j < S::kFours; ++j) {
    const int i = j * kThreads + static_cast<int>(threadIdx.x);
    if (p.swiglu || i >= rows * kFoursOfRow) break;
    residuals[j].load(p, first_row + i / kFoursOfRow,
                      first_tile * kTileOutputs + 4 * (i % kFoursOfRow), vectors);
  }

  float sums[kOutputTiles][kRowTiles][4] = {};
  const auto load = [&](const unsigned char* from, int row) {
    return load_eight(from + row * S::kRowBytes + 16 * lane);
  };
  int slot = 0;
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    cp_async_wait<S::kSlots - 1>();
    __syncwarp();  // the other lanes have waited too
    if (chunk == 0) stamps.take(2);
    const unsigned char* const from = ring + slot * S::kSlotBytes;
    Eight of_x[kRowTiles];
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) of_x[j] = load(from, S::kOutputs + kTileRows * j);
#pragma unroll
    for (int i = 0; i < kOutputTiles; ++i) {
      const Eight low = load(from, kTileOutputs * i);
      const Eight high = load(from, kTileOutputs * i + kHalf);
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) multiply_chunk(sums[i][j], low, high, of_x[j]);
    }
    __syncwarp();  // the other lanes have read the slot too
    if (chunk + S::kSlots < chunks) {
      copy_w(slot);
      copy_x(slot);
    }
    cp_async_commit();
    slot = slot + 1 == S::kSlots ? 0 : slot + 1;
  }
  cp_async_wait<0>();
  __syncwarp();
  stamps.take(3);

  const auto sums_of = [&](int from) {
    return reinterpret_cast<float*>(memory + from * S::kWarpBytes);
  };
  float* const mine = sums_of(warp) + 2 * q * S::kStride + g;
#pragma unroll
  for (int i = 0; i < kOutputTiles; ++i) {
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
      float* const at = mine + kTileRows * j * S::kStride + kTileOutputs * i;
      at[0] = sums[i][j][0];
      at[S::kStride] = sums[i][j][1];
      at[kHalf] = sums[i][j][2];
      at[kHalf + S::kStride] = sums[i][j][3];
    }
  }
  __syncthreads();
  stamps.take(4);
  const auto sum_over_warps = [&](int row, int output, float(&y)[4]) {
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int from = 0; from < kWarps; ++from) {
      const float4 other =
          *reinterpret_cast<const float4*>(sums_of(from) + row * S::kStride + output);
      sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
    }
    y[0] = p.alpha * sum.x, y[1] = p.alpha * sum.y, y[2] = p.alpha * sum.z, y[3] = p.alpha * sum.w;
  };
  if (p.swiglu) {
    // Of a tile of gates and values, the two fours of gates.
    constexpr int kGatesOfRow = 2 * kOutputTiles;
#pragma unroll
    for (int j = 0; j < (S::kFours + 1) / 2; ++j) {
      const int i = j * kThreads + static_cast<int>(threadIdx.x);
      if (i >= rows * kGatesOfRow) break;
      const int row = i / kGatesOfRow;
      const int four = i % kGatesOfRow;
      // Of every second two tiles the values come first: then there are no bank conflicts.
      const bool values_first = four / 4 % 2 == 1;
      const int at = four / 2 * kTileOutputs + four % 2 * 4;
      float first[4], second[4], y[4];
      sum_over_warps(row, at + (values_first ? kHalf : 0), first);
      sum_over_warps(row, at + (values_first ? 0 : kHalf), second);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        y[c] = swiglu(p, values_first ? second[c] : first[c], values_first ? first[c] : second[c]);
      }
      store_outputs(p, first_row + row, first_tile * kHalf + 4 * four, y, vectors);
    }
  } else {
#pragma unroll
    for (int j = 0; j < S::kFours; ++j) {
      const int i = j * kThreads + static_cast<int>(threadIdx.x);
      if (i >= rows * kFoursOfRow) break;
      const int row = i / kFoursOfRow;
      const int four = i % kFoursOfRow;
      const int64_t output = first_tile * kTileOutputs + 4 * four;
      float y[4];
      sum_over_warps(row, 4 * four, y);
      residuals[j].add(p, first_row + row, output, vectors, y);
      store_outputs(p, first_row + row, output, y, vectors);
    }
  }
  stamps.take(5);
  if (threadIdx.x == 0) stamps.keep(p.n, p.k);
}

template <int kOutputTiles, int kRowTiles>
void launch_wide(cudaStream_t stream, const SkinnyGemm& p) {
  using S = WideSizes<kOutputTiles, kRowTiles>;
  const bool vectors = p.n % 4 == 0 && p.y.stride % 4 == 0 && p.residual.stride % 4 == 0 &&
                       reinterpret_cast<uintptr_t>(p.y.data) % 16 == 0 &&
                       reinterpret_cast<uintptr_t>(p.residual.data) % 16 == 0;
  launch_early(
      "skinny_gemm", p.early, stream, skinny_gemm_wide_kernel<kOutputTiles, kRowTiles>,
      {.grid = dim3(blocks(p.n, S::kOutputs / (p.swiglu ? 2 : 1)), blocks(p.rows, S::kRows)),
       .threads = kThreads,
       .shared_bytes = S::kSharedBytes},
      p, chunks_of_warp(p.k), vectors);
}

// A block copies its rows of w and of x. Their numbers are those with which the multiprocessors
// that have most blocks copy least, since what limits such a block is how fast they come from the
// L2 cache.
template <int kRowTiles>
void launch_wide_rows(cudaStream_t stream, const SkinnyGemm& p) {
  const int64_t products = p.swiglu ? 2 * p.n : p.n;
  const int64_t processors = multiprocessors();
  const auto most_rows = [&](int tiles, int row_tiles) {
    const int64_t blocks =
        ceil_div(products, kTileOutputs * tiles) * ceil_div(p.rows, kTileRows * row_tiles);
    return ceil_div(blocks, processors) * (kTileOutputs * tiles + kTileRows * row_tiles);
  };
  const int64_t of_one = most_rows(1, kRowTiles);
  const int64_t of_three = most_rows(3, kRowTiles);
  const int64_t of_four = most_rows(4, kRowTiles);
  if constexpr (kRowTiles == 8) {
    const int64_t of_halves = most_rows(2, kRowTiles / 2);
    if (of_halves < std::min(of_one, std::min(of_three, of_four))) {
      return launch_wide<2, kRowTiles / 2>(stream, p);
    }
  }
  if (of_one < of_three && of_one < of_four) return launch_wide<1, kRowTiles>(stream, p);
  if (of_three < of_four) return launch_wide<3, kRowTiles>(stream, p);
  launch_wide<4, kRowTiles>(stream, p);
}

}  // namespace

void skinny_gemm_wide(cudaStream_t stream, const SkinnyGemm& p) {
  write_stamps_at_exit("skinny_gemm_wide");
  if (p.rows <= 16) return launch_wide_rows<2>(stream, p);
  if (p.rows <= 32) return launch_wide_rows<4>(stream, p);
  launch_wide_rows<8>(stream, p);
}

}  // namespace sbtrain::kernels
