#include "kernels/few_rows.h"
#include "kernels/pack.cuh"
#include "kernels/primitives/dependent_launch.cuh"
#include "kernels/primitives/mma.cuh"

namespace sbtrain::kernels {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kTileOutputs = 16;  // rows of w in one mma
constexpr int kTileRows = 8;      // rows of x in one mma
constexpr int kChunk = 32;        // channels of two mma
// On a GPU of this many multiprocessors or more, blocks compute fewer outputs rather than leave
// some of them idle.
constexpr int64_t kFewestBlocks = 96;

// Eight neighbouring channels of one row, bf16. Lane q of four has channels 8q to 8q+7 of a chunk.
// The products of a chunk take them in the order of the lanes, which is the same for x and w.
struct Eight {
  uint32_t pair[4];
};

// Zeros beyond the last channel: what lies there may be NaN.
template <bool kVectors>
__device__ __forceinline__ Eight load_eight(const bf16* row, int channel, int channels) {
  Eight x{};
  if constexpr (kVectors) {
    if (channel < channels) {
      const uint4 loaded = *reinterpret_cast<const uint4*>(row + channel);
      x = {{loaded.x, loaded.y, loaded.z, loaded.w}};
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t bits = channel + i < channels ? __bfloat16_as_ushort(row[channel + i]) : 0;
      x.pair[i / 2] |= bits << (16 * (i % 2));
    }
  }
  return x;
}

// The products of one chunk: 16 outputs, whose first and last 8 rows of w are `low` and `high`.
__device__ __forceinline__ void multiply_chunk(float (&sums)[4], const Eight& low,
                                               const Eight& high, const Eight& x) {
  mma_m16n8k16_bf16(sums, {low.pair[0], high.pair[0], low.pair[1], high.pair[1]}, x.pair[0],
                    x.pair[1]);
  mma_m16n8k16_bf16(sums, {low.pair[2], high.pair[2], low.pair[3], high.pair[3]}, x.pair[2],
                    x.pair[3]);
}

// What is added to an output; 0 beyond the last row and output.
__device__ __forceinline__ float load_residual(const FewRows& p, int64_t row, int64_t output) {
  if (p.residual.data == nullptr || row >= p.rows || output >= p.n) return 0.0f;
  const int64_t at = row * p.residual.stride + output;
  return p.type == Type::kF32 ? static_cast<const float*>(p.residual.data)[at]
                              : to_float(static_cast<const bf16*>(p.residual.data)[at]);
}

__device__ __forceinline__ void store_output(const FewRows& p, int64_t row, int64_t output,
                                             float y) {
  if (output >= p.n) return;
  const int64_t at = row * p.y.stride + output;
  if (p.type == Type::kF32) {
    static_cast<float*>(p.y.data)[at] = y;
  } else {
    static_cast<bf16*>(p.y.data)[at] = __float2bfloat16_rn(y);
  }
}

// A block computes 16 kOutputTiles outputs of up to 8 kRowTiles rows. Chunk c of the channels
// belongs to warp c % kWarps, and the warps' sums are added in the order of the warps.
template <int kOutputTiles, int kRowTiles, bool kVectors>
__global__ void __launch_bounds__(kThreads) few_rows_kernel(const FewRows p) {
  constexpr int kLoaded = 4 / kOutputTiles;  // chunks of w whose loads are in flight
  constexpr int kRows = kTileRows * kRowTiles;
  constexpr int kStride = kRows + (kRowTiles > 1 ? 8 : 0);  // without bank conflicts
  __shared__ float shared[kWarps][kTileOutputs][kStride];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4;
  const int q = lane % 4;
  const int k = static_cast<int>(p.k);
  const int rows = static_cast<int>(p.rows);
  const int64_t first = int64_t{blockIdx.x} * (kTileOutputs * kOutputTiles);
  let_next_kernel_begin();
  if constexpr (kVectors) {
    const int64_t output = first + threadIdx.x;
    if (threadIdx.x < kTileOutputs * kOutputTiles && output < p.n) {
      prefetch_to_l2(p.w.row(output), static_cast<uint32_t>(k * sizeof(bf16)));
    }
  }
  wait_for_previous_kernel();

  // Rows beyond the last are computed from the last one and not stored.
  const bf16* w[kOutputTiles][2];
#pragma unroll
  for (int i = 0; i < kOutputTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      w[i][half] = p.w.row(min(first + kTileOutputs * i + 8 * half + g, p.n - 1));
    }
  }
  // At the end a thread adds up the warps' sums of every 16th row. What it adds to the first of
  // them arrives meanwhile.
  const int tile_output = static_cast<int>(threadIdx.x) % kTileOutputs;
  const int first_row = static_cast<int>(threadIdx.x) / kTileOutputs;
  float residual[kOutputTiles];
#pragma unroll
  for (int i = 0; i < kOutputTiles; ++i) {
    residual[i] = load_residual(p, first_row, first + kTileOutputs * i + tile_output);
  }
  const int chunks = (k + kChunk - 1) / kChunk;
  float sums[kOutputTiles][kRowTiles][4] = {};
  for (int chunk = warp; chunk < chunks; chunk += kWarps * kLoaded) {
    Eight of_w[kLoaded][kOutputTiles][2];
#pragma unroll
    for (int c = 0; c < kLoaded; ++c) {
      const int channel = (chunk + kWarps * c) * kChunk + 8 * q;
#pragma unroll
      for (int i = 0; i < kOutputTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          of_w[c][i][half] = load_eight<kVectors>(w[i][half], channel, k);
        }
      }
    }
#pragma unroll
    for (int c = 0; c < kLoaded; ++c) {
      const int channel = (chunk + kWarps * c) * kChunk + 8 * q;
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) {
        const int row = kTileRows * j + g;
        Eight of_x{};
        if (row < rows) of_x = load_eight<kVectors>(p.x.row(row), channel, k);
#pragma unroll
        for (int i = 0; i < kOutputTiles; ++i) {
          multiply_chunk(sums[i][j], of_w[c][i][0], of_w[c][i][1], of_x);
        }
      }
    }
  }

#pragma unroll
  for (int i = 0; i < kOutputTiles; ++i) {
    if (i > 0) __syncthreads();  // all have read the sums of the tile before
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* to = &shared[warp][8 * half + g][kTileRows * j + 2 * q];
        to[0] = sums[i][j][2 * half];
        to[1] = sums[i][j][2 * half + 1];
      }
    }
    __syncthreads();
    const int64_t output = first + kTileOutputs * i + tile_output;
    for (int row = first_row; row < rows; row += kThreads / kTileOutputs) {
      float sum = 0.0f;
#pragma unroll
      for (int from = 0; from < kWarps; ++from) sum += shared[from][tile_output][row];
      const float added = row == first_row ? residual[i] : load_residual(p, row, output);
      store_output(p, row, output, p.alpha * sum + added);
    }
  }
}

template <int kOutputTiles, int kRowTiles, bool kVectors>
void launch(cudaStream_t stream, const FewRows& p) {
  launch_early("few_rows", p.early, stream, few_rows_kernel<kOutputTiles, kRowTiles, kVectors>,
               dim3(blocks(p.n, kTileOutputs * kOutputTiles)), kThreads, p);
}

template <int kRowTiles>
void launch_rows(cudaStream_t stream, const FewRows& p, bool vectors) {
  if (!vectors) return launch<1, kRowTiles, false>(stream, p);
  // A block reads all of x, which counts once that is as much as its part of w.
  const auto fills = [&](int tiles) { return p.n / (kTileOutputs * tiles) >= kFewestBlocks; };
  if (kRowTiles > 2 && fills(4)) return launch<4, kRowTiles, true>(stream, p);
  if (kRowTiles > 1 && fills(2)) return launch<2, kRowTiles, true>(stream, p);
  launch<1, kRowTiles, true>(stream, p);
}

}  // namespace

void few_rows(cudaStream_t stream, const FewRows& p) {
  if (p.rows == 0 || p.n == 0) return;
  if (p.rows > kFewRows || p.k > INT32_MAX / 2) {
    throw std::invalid_argument("few_rows: " + std::to_string(p.rows) + " rows of " +
                                std::to_string(p.k) + " channels; at most " +
                                std::to_string(kFewRows) + " rows");
  }
  const bool vectors = p.k % 8 == 0 && vectors_fit<8>(p.x, p.w);
  if (p.rows <= 8) return launch_rows<1>(stream, p, vectors);
  if (p.rows <= 16) return launch_rows<2>(stream, p, vectors);
  if (p.rows <= 32) return launch_rows<4>(stream, p, vectors);
  launch_rows<8>(stream, p, vectors);
}

}  // namespace sbtrain::kernels
