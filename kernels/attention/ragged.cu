#include "kernels/attention/ragged.h"
#include "kernels/launch.h"
#include "kernels/tile_grid.h"

namespace sbtrain::kernels {
namespace {

constexpr int kTransposeThreads = 256;
constexpr int kTransposeTile = 32;

__global__ void ragged_kernel(RaggedBatch ragged, int64_t* offsets, int32_t* lengths) {
  const int n = static_cast<int>(blockIdx.x) * kTransposeThreads + static_cast<int>(threadIdx.x);
  if (n > ragged.batch) return;
  const int begin = ragged.cu_seqlens[min(n, ragged.sequences)];
  for (int i = 0; i < ragged.tensors; ++i) {
    offsets[static_cast<int64_t>(i) * (ragged.batch + 1) + n] = begin * ragged.stride[i];
  }
  if (n < ragged.batch) lengths[n] = ragged.cu_seqlens[min(n + 1, ragged.sequences)] - begin;
}

__global__ void transpose_kernel(TileGrid grid, float* y, const float* x, int rows, int cols) {
  __shared__ float tile[kTransposeTile][kTransposeTile + 1];
  const TilePlace place = grid.place(blockIdx.x);
  const int row = static_cast<int>(place.down) * kTransposeTile;
  const int col = static_cast<int>(place.across) * kTransposeTile;
  const int lane = static_cast<int>(threadIdx.x);
  for (int i = static_cast<int>(threadIdx.y); i < kTransposeTile;
       i += kTransposeThreads / kTransposeTile) {
    if (row + i < rows && col + lane < cols) {
      tile[i][lane] = x[static_cast<int64_t>(row + i) * cols + col + lane];
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.y); i < kTransposeTile;
       i += kTransposeThreads / kTransposeTile) {
    if (col + i < cols && row + lane < rows) {
      y[static_cast<int64_t>(col + i) * rows + row + lane] = tile[lane][i];
    }
  }
}

}  // namespace

void ragged_batch(cudaStream_t stream, const RaggedBatch& ragged, int64_t* offsets,
                  int32_t* lengths) {
  ragged_kernel<<<ragged.batch / kTransposeThreads + 1, kTransposeThreads, 0, stream>>>(
      ragged, offsets, lengths);
  check_launch("ragged_batch");
}

void transpose_f32(cudaStream_t stream, float* y, const float* x, int rows, int cols) {
  if (rows == 0 || cols == 0) return;
  const TileGrid grid = TileGrid::of(rows, cols, kTransposeTile);
  transpose_kernel<<<grid.blocks(), dim3(kTransposeTile, kTransposeThreads / kTransposeTile), 0,
                     stream>>>(grid, y, x, rows, cols);
  check_launch("transpose_f32");
}

}  // namespace sbtrain::kernels
