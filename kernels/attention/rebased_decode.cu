#include "kernels/attention/rebased.h"
#include "kernels/attention/rebased_index.h"
#include "kernels/launch.h"
#include "kernels/pack.cuh"

namespace sbtrain::kernels {
namespace {

constexpr int kDecodeWarps = 8;
constexpr int kMaxColumns = (kMaxRebasedValues + 1 + 31) / 32;  // of a lane

// One block for each head of each sequence. A warp takes every kDecodeWarps-th row of the state, a
// lane every 32nd column.
__global__ void __launch_bounds__(32 * kDecodeWarps) rebased_decode_kernel(const RebasedDecode p) {
  __shared__ float q[kMaxRebasedFeatures + 1], k[kMaxRebasedFeatures + 1];
  __shared__ float sums[kDecodeWarps][32 * kMaxColumns];
  const int thread = static_cast<int>(threadIdx.x);
  const int head = static_cast<int>(blockIdx.x);
  const int64_t b = blockIdx.y;
  const int f = p.features;
  const int e = p.values;
  const bool lower = p.s.constant != 0.0f || p.s.linear != 0.0f;
  for (int a = thread; a < f; a += 32 * kDecodeWarps) {
    q[a] = p.s.scale * to_float(p.q.data[b * p.q.stride + head * f + a]);
    k[a] = to_float(p.k.data[b * p.k.stride + head * f + a]);
  }
  if (thread == 0) q[f] = k[f] = 1.0f;
  __syncthreads();
  const int warp = thread / 32;
  const int lane = thread % 32;
  const int rows = rebased_rows(f, lower);
  const bool fresh = p.positions[b] == 0;
  float* const state = p.state + (b * p.heads + head) * rows * (e + 1);
  const bf16* const value = p.v.data + b * p.v.stride + head * e;
  float v[kMaxColumns], y[kMaxColumns] = {};
#pragma unroll
  for (int j = 0; j < kMaxColumns; ++j) {
    const int c = lane + 32 * j;
    v[j] = c < e ? to_float(value[c]) : 1.0f;
  }
#pragma unroll 4
  for (int row = warp; row < rows; row += kDecodeWarps) {
    const RebasedFactors of = rebased_factors(f, lower, row);
    const float of_k = k[of.a] * k[of.b];
    const float factor = of.a == f      ? p.s.constant
                         : of.b == f    ? p.s.linear
                         : of.a == of.b ? p.s.square
                                        : 2.0f * p.s.square;
    const float of_q = factor * q[of.a] * q[of.b];
    float* const at = state + int64_t{row} * (e + 1);
#pragma unroll
    for (int j = 0; j < kMaxColumns; ++j) {
      const int c = lane + 32 * j;
      if (c > e) continue;
      const float now = (fresh ? 0.0f : at[c]) + of_k * v[j];
      at[c] = now;
      y[j] += of_q * now;
    }
  }
#pragma unroll
  for (int j = 0; j < kMaxColumns; ++j) sums[warp][lane + 32 * j] = y[j];
  __syncthreads();
  const auto total = [&](int c) {
    float sum = 0.0f;
    for (int w = 0; w < kDecodeWarps; ++w) sum += sums[w][c];
    return sum;
  };
  for (int c = thread; c < e; c += 32 * kDecodeWarps) {
    p.o.data[b * p.o.stride + head * e + c] = __float2bfloat16_rn(total(c) / (total(e) + p.s.eps));
  }
}

}  // namespace

void launch(cudaStream_t stream, const RebasedDecode& p) {
  if (p.batch == 0 || p.heads == 0) return;
  const dim3 grid(static_cast<unsigned>(p.heads), static_cast<unsigned>(p.batch));
  rebased_decode_kernel<<<grid, 32 * kDecodeWarps, 0, stream>>>(p);
  check_launch("rebased_decode");
}

}  // namespace sbtrain::kernels
