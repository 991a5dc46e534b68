#include <cuda_fp8.h>

#include "kernels/fp8.h"
#include "kernels/pack.cuh"
#include "kernels/tile_grid.h"

namespace sbtrain::kernels {
namespace {

constexpr int kAmaxThreads = 256;
constexpr int kAmaxBlocks = 2048;  // at most
constexpr int kAmaxWidth = 8;      // elements that a thread reads at once

// The largest bit pattern without sign is that of the largest number, and that of NaN if there is
// one: the order in which blocks come does not matter.
template <typename X, int kWidth>
__global__ void __launch_bounds__(kAmaxThreads)
    amax_kernel(unsigned* amax, Matrix<const X> x, int64_t rows, int64_t packs_per_row) {
  unsigned largest = 0;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    for (int64_t pack = int64_t{blockIdx.x} * kAmaxThreads + threadIdx.x; pack < packs_per_row;
         pack += int64_t{gridDim.x} * kAmaxThreads) {
      const auto values = load_floats<kWidth>(x.row(row) + pack * kWidth);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        largest = max(largest, __float_as_uint(values[i]) & 0x7fffffffu);
      }
    }
  }
  largest = __reduce_max_sync(~0u, largest);
  __shared__ unsigned of_warp[kAmaxThreads / 32];
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = largest;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (const unsigned other : of_warp) largest = max(largest, other);
  atomicMax(amax, largest);
}

template <typename X>
void amax_typed(cudaStream_t stream, const Amax& p) {
  const bool flat = p.x.stride == p.cols;
  const int64_t rows = flat ? 1 : p.rows;
  const int64_t cols = flat ? p.rows * p.cols : p.cols;
  const Matrix<const X> x{static_cast<const X*>(p.x.data), p.x.stride};
  if (rows == 0 || cols == 0) return;
  with_width<kAmaxWidth>(vectors_fit<kAmaxWidth>(x) && cols % kAmaxWidth == 0, [&](auto width) {
    constexpr int kPackWidth = decltype(width)::value;
    const int64_t packs = cols / kPackWidth;
    const int64_t across = std::min<int64_t>(ceil_div(packs, kAmaxThreads), kAmaxBlocks);
    const int64_t down = std::min(rows, std::max<int64_t>(kAmaxBlocks / across, 1));
    const dim3 grid(static_cast<unsigned>(across), static_cast<unsigned>(down));
    amax_kernel<X, kPackWidth>
        <<<grid, kAmaxThreads, 0, stream>>>(reinterpret_cast<unsigned*>(p.amax), x, rows, packs);
  });
  check_launch("amax");
}

// Each block casts a tile of kCastTile x kCastTile elements: it reads rows and writes rows, and
// what it has written to shared memory once more as columns.
constexpr int kCastTile = 64;
constexpr int kCastThreads = 256;
constexpr int kFour = 4;  // elements that a thread writes at once

// core/fp8.h has the same special cases.
__device__ float scale_of(float amax, float largest) {
  if (amax == 0.0f) return 1.0f;
  const float scale = __fdiv_rn(largest, amax);
  return scale > 0x1p126f ? 0x1p126f : scale;
}

template <__nv_fp8_interpretation_t kFormat>
__device__ uint8_t to_fp8(float x) {
  return static_cast<uint8_t>(__nv_cvt_float_to_fp8(x, __NV_SATFINITE, kFormat));
}

__device__ void store_four(uint8_t* row, int64_t col, int64_t cols, const uint8_t (&x)[kFour],
                           bool vectors) {
  if (vectors && col + kFour <= cols) {
    *reinterpret_cast<uchar4*>(row + col) = {x[0], x[1], x[2], x[3]};
    return;
  }
  for (int i = 0; i < kFour; ++i) {
    if (col + i < cols) row[col + i] = x[i];
  }
}

template <typename X, __nv_fp8_interpretation_t kFormat>
__global__ void __launch_bounds__(kCastThreads)
    cast_kernel(TileGrid grid, Matrix<uint8_t> y, Matrix<uint8_t> y_t, float* inverse_scale,
                Matrix<const X> x, const float* amax, int64_t rows, int64_t cols, bool x_vectors,
                bool y_vectors, bool y_t_vectors) {
  constexpr float kLargest = kFormat == __NV_E4M3 ? 448.0f : 57344.0f;
  // A row of 68 bytes is 17 banks: four rows of a column lie in four banks.
  __shared__ uint8_t tile[kCastTile][kCastTile + kFour];
  const float scale = scale_of(*amax, kLargest);
  const TilePlace place = grid.place(blockIdx.x);
  const int64_t first_row = place.down * kCastTile;
  const int64_t first_col = place.across * kCastTile;
  if (blockIdx.x == 0 && threadIdx.x == 0) *inverse_scale = __fdiv_rn(1, scale);
  constexpr int kAcross = kCastTile / kFour;
  const int across = static_cast<int>(threadIdx.x) % kAcross * kFour;
  for (int down = static_cast<int>(threadIdx.x) / kAcross; down < kCastTile;
       down += kCastThreads / kAcross) {
    const int64_t row = first_row + down, col = first_col + across;
    uint8_t four[kFour] = {};
    if (row < rows && col < cols) {
      Pack<float, kFour> values{};
      if (x_vectors && col + kFour <= cols) {
        values = load_floats<kFour>(x.row(row) + col);
      } else {
        for (int i = 0; i < kFour; ++i) {
          if (col + i < cols) values[i] = to_float(x.row(row)[col + i]);
        }
      }
#pragma unroll
      for (int i = 0; i < kFour; ++i) four[i] = to_fp8<kFormat>(values[i] * scale);
      if (y) store_four(y.row(row), col, cols, four, y_vectors);
    }
    *reinterpret_cast<uchar4*>(&tile[down][across]) = {four[0], four[1], four[2], four[3]};
  }
  if (!y_t) return;
  __syncthreads();
  for (int down = static_cast<int>(threadIdx.x) / kAcross; down < kCastTile;
       down += kCastThreads / kAcross) {
    const int64_t row = first_col + down, col = first_row + across;  // of y_t
    if (row >= cols || col >= rows) continue;
    uint8_t four[kFour];
#pragma unroll
    for (int i = 0; i < kFour; ++i) four[i] = tile[across + i][down];
    store_four(y_t.row(row), col, rows, four, y_t_vectors);
  }
}

template <typename X, __nv_fp8_interpretation_t kFormat>
void cast_typed(cudaStream_t stream, const CastFp8& p) {
  if (p.rows == 0 || p.cols == 0) return;
  const Matrix<const X> x{static_cast<const X*>(p.x.data), p.x.stride};
  const Matrix<uint8_t> y{static_cast<uint8_t*>(p.y.data), p.y.stride};
  const Matrix<uint8_t> y_t{static_cast<uint8_t*>(p.y_t.data), p.y_t.stride};
  const TileGrid grid = TileGrid::of(p.rows, p.cols, kCastTile);
  cast_kernel<X, kFormat><<<grid.blocks(), kCastThreads, 0, stream>>>(
      grid, y, y_t, p.inverse_scale, x, p.amax, p.rows, p.cols, vectors_fit<kFour>(x),
      vectors_fit<kFour>(y), vectors_fit<kFour>(y_t));
  check_launch("cast_fp8");
}

template <typename X>
void cast_from(cudaStream_t stream, const CastFp8& p) {
  if (p.type == Type::kE4M3) return cast_typed<X, __NV_E4M3>(stream, p);
  if (p.type == Type::kE5M2) return cast_typed<X, __NV_E5M2>(stream, p);
  throw_invalid_argument("cast_fp8: no such type");
}

constexpr float kE4M3Max = 448.0f;

__global__ void scales_kernel(Fp8Scales p) {
  const int64_t col = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (col >= p.cols) return;
  unsigned largest = 0;
  for (int64_t row = 0; row < p.rows; ++row) {
    largest = max(largest, __float_as_uint(p.x.row(row)[col]) & 0x7fffffffu);
  }
  const float amax = __uint_as_float(largest);
  p.amax[col] = amax;
  *p.inverse_scale.row(col) = __fdiv_rn(1, scale_of(amax, kE4M3Max));
}

// A block transposes a tile as cast_kernel does.
__global__ void __launch_bounds__(kCastThreads)
    transpose_kernel(TileGrid grid, Matrix<uint8_t> y, Matrix<const uint8_t> x, int64_t rows,
                     int64_t cols, bool x_vectors, bool y_vectors) {
  __shared__ uint8_t tile[kCastTile][kCastTile + kFour];
  const TilePlace place = grid.place(blockIdx.x);
  const int64_t first_row = place.down * kCastTile;
  const int64_t first_col = place.across * kCastTile;
  constexpr int kAcross = kCastTile / kFour;
  const int across = static_cast<int>(threadIdx.x) % kAcross * kFour;
  for (int down = static_cast<int>(threadIdx.x) / kAcross; down < kCastTile;
       down += kCastThreads / kAcross) {
    const int64_t row = first_row + down, col = first_col + across;
    if (row >= rows || col >= cols) continue;
    const uint8_t* from = x.row(row) + col;
    if (x_vectors && col + kFour <= cols) {
      *reinterpret_cast<uchar4*>(&tile[down][across]) = *reinterpret_cast<const uchar4*>(from);
    } else {
      for (int i = 0; i < kFour; ++i) {
        if (col + i < cols) tile[down][across + i] = from[i];
      }
    }
  }
  __syncthreads();
  for (int down = static_cast<int>(threadIdx.x) / kAcross; down < kCastTile;
       down += kCastThreads / kAcross) {
    const int64_t row = first_col + down, col = first_row + across;  // of y
    if (row >= cols || col >= rows) continue;
    uint8_t four[kFour];
#pragma unroll
    for (int i = 0; i < kFour; ++i) four[i] = tile[across + i][down];
    store_four(y.row(row), col, rows, four, y_vectors);
  }
}

}  // namespace

void launch(cudaStream_t stream, const Fp8Scales& p) {
  if (p.cols == 0) return;
  constexpr int kThreads = 128;
  scales_kernel<<<blocks(p.cols, kThreads), kThreads, 0, stream>>>(p);
  check_launch("fp8_scales");
}

void launch(cudaStream_t stream, const TransposeFp8& p) {
  if (p.rows == 0 || p.cols == 0) return;
  const Matrix<const uint8_t> x{static_cast<const uint8_t*>(p.x.data), p.x.stride};
  const Matrix<uint8_t> y{static_cast<uint8_t*>(p.y.data), p.y.stride};
  const TileGrid grid = TileGrid::of(p.rows, p.cols, kCastTile);
  transpose_kernel<<<grid.blocks(), kCastThreads, 0, stream>>>(
      grid, y, x, p.rows, p.cols, vectors_fit<kFour>(x), vectors_fit<kFour>(y));
  check_launch("transpose_fp8");
}

void launch(cudaStream_t stream, const Amax& p) {
  check_cuda("amax", cudaMemsetAsync(p.amax, 0, sizeof(float), stream));
  if (p.x_type == Type::kF32) return amax_typed<float>(stream, p);
  if (p.x_type == Type::kBF16) return amax_typed<bf16>(stream, p);
  throw_invalid_argument("amax: no such type");
}

void launch(cudaStream_t stream, const CastFp8& p) {
  if (p.x_type == Type::kF32) return cast_from<float>(stream, p);
  if (p.x_type == Type::kBF16) return cast_from<bf16>(stream, p);
  throw_invalid_argument("cast_fp8: no such type");
}

}  // namespace sbtrain::kernels
