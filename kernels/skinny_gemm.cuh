// The arithmetic that the kernels of skinny matrix products share, so that a row has the same bits
// whichever of them computes it: the order in which channels are multiplied and added, the norm of
// the inputs, and what becomes of a sum.
//
// The channels are divided into chunks, and the chunks among the warps of a block. A warp adds the
// products of its chunks in their order; the sums of the warps are added in the order of the warps.
#pragma once

#include "kernels/device_attribute.h"
#include "kernels/pack.cuh"
#include "kernels/primitives/mma.cuh"
#include "kernels/skinny_gemm.h"

namespace sbtrain::kernels {

// Launches the kernel of gemv.cu, unless it is not for this product or this GPU: then it returns
// false. Inputs and weights are in vectors of 16 aligned bytes.
bool gemv(cudaStream_t stream, const SkinnyGemm& p);

// Launches the kernel of skinny_gemm_wide.cu: products of 9 to 64 rows without a norm, of a
// multiple of kChunk channels, where rows * x.stride is at most INT32_MAX. Inputs and weights are
// in vectors.
void skinny_gemm_wide(cudaStream_t stream, const SkinnyGemm& p);

namespace products {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kTileOutputs = 16;  // rows of w in one mma
constexpr int kHalf = 8;          // of them; with swiglu the gates, then the values
constexpr int kTileRows = 8;      // rows of x in one mma
// Channels of two mma. Lane q of four has channels 8q to 8q+7 of a chunk. The products take them in
// the order of the lanes, which is the same for x and w.
constexpr int kChunk = 32;
constexpr int kChunkVectors = 4;  // of 8 channels, 16 bytes

// Up to this many channels, two blocks with two tiles of outputs and two rows each fit a
// multiprocessor.
constexpr int64_t kMostForTwoTiles = 6 * kChunk * kWarps;
// A block with two tiles of outputs executes fewer instructions, but not more than about half of
// the multiprocessors shall be idle.
inline bool prefers_two_tiles(const SkinnyGemm& p) {
  const int64_t outputs = p.swiglu ? 2 * p.n : p.n;
  return p.k <= kMostForTwoTiles && outputs / (2 * kTileOutputs) >= half_of_multiprocessors();
}

// The products of one chunk: 16 outputs, whose first and last 8 rows of w are `low` and `high`.
__device__ __forceinline__ void multiply_chunk(float (&sums)[4], const Eight& low,
                                               const Eight& high, const Eight& x) {
  mma_m16n8k16_bf16(sums, {low.pair[0], high.pair[0], low.pair[1], high.pair[1]}, x.pair[0],
                    x.pair[1]);
  mma_m16n8k16_bf16(sums, {low.pair[2], high.pair[2], low.pair[3], high.pair[3]}, x.pair[2],
                    x.pair[3]);
}

// The sum of squares of the vectors that a lane has of a warp's share of a row, then over the
// lanes.
template <typename Load>
__device__ __forceinline__ float sum_squares(int vectors, int lane, const Load& load) {
  float sum = 0.0f;
  for (int v = lane; v < vectors; v += 32) {
    const Eight x = load(v);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = floats_of(x.pair[i]);
      sum = fmaf(pair.x, pair.x, sum);
      sum = fmaf(pair.y, pair.y, sum);
    }
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(~0u, sum, distance);
  }
  return sum;
}

// 1 / rms of a row, of whose squares each warp has summed its share.
template <int kRows>
__device__ __forceinline__ float inverse_rms(const float (&squares)[kWarps][kRows], int row,
                                             const SkinnyGemm& p) {
  float sum = 0.0f;
#pragma unroll
  for (int from = 0; from < kWarps; ++from) sum += squares[from][row];
  return rsqrtf(sum / static_cast<float>(p.k) + p.norm_eps);
}

__device__ __forceinline__ Eight normalise(const Eight& x, const Eight& w, float inverse_rms) {
  Eight y;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 a = floats_of(x.pair[i]);
    const float2 b = floats_of(w.pair[i]);
    y.pair[i] = pack_bf16(a.x * (inverse_rms * b.x), a.y * (inverse_rms * b.y));
  }
  return y;
}

// What is added to an output; 0 beyond the last row and output.
__device__ __forceinline__ float load_residual(const SkinnyGemm& p, int64_t row, int64_t output) {
  if (p.residual.data == nullptr || row >= p.rows || output >= p.n) return 0.0f;
  const int64_t at = row * p.residual.stride + output;
  return p.type == Type::kF32 ? static_cast<const float*>(p.residual.data)[at]
                              : to_float(static_cast<const bf16*>(p.residual.data)[at]);
}

__device__ __forceinline__ void store_output(const SkinnyGemm& p, int64_t row, int64_t output,
                                             float y) {
  if (output >= p.n) return;
  const int64_t at = row * p.y.stride + output;
  if (p.type == Type::kF32) {
    static_cast<float*>(p.y.data)[at] = y;
  } else {
    static_cast<bf16*>(p.y.data)[at] = __float2bfloat16_rn(y);
  }
}

__device__ __forceinline__ float swiglu(const SkinnyGemm& p, float gate, float value) {
  if (p.type != Type::kF32) {
    gate = to_float(__float2bfloat16_rn(gate));
    value = to_float(__float2bfloat16_rn(value));
  }
  return value * (gate * __fdividef(1.0f, 1.0f + __expf(-gate)));
}

// Warp i has the chunks [i * of_warp, (i + 1) * of_warp), as far as there are any.
inline int chunks_of_warp(int64_t k) {
  return static_cast<int>(ceil_div(ceil_div(k, kChunk), kWarps));
}

}  // namespace products

}  // namespace sbtrain::kernels
