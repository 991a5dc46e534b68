// Sums over tokens, the gradients of per-channel weights. The kernels that read the tokens form
// them in kTokenParts parts, which are added here. The order depends only on the shapes.
#pragma once

#include "kernels/launch.h"
#include "kernels/scratch_sizes.h"

namespace sbtrain::kernels {

// The rows that part `part` sums over: [first_row(part), first_row(part + 1)).
inline __device__ int64_t first_row(int64_t rows, int64_t part) {
  return rows * part / kTokenParts;
}

// y [cols] += the sum over parts of the first `cols` columns of sums [kTokenParts, stride], or =
// without `accumulate`.
inline constexpr int kSumLanes = 32;
static __global__ void __launch_bounds__(kSumLanes* kSumLanes)
    add_parts_kernel(float* y, const float* sums, int64_t stride, int64_t cols, bool accumulate) {
  __shared__ float shared[kSumLanes][kSumLanes];
  const int64_t col = int64_t{blockIdx.x} * kSumLanes + threadIdx.x;
  float sum = 0.0f;
  if (col < cols) {
#pragma unroll 4
    for (int64_t part = threadIdx.y; part < kTokenParts; part += kSumLanes) {
      sum += sums[part * stride + col];
    }
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || col >= cols) return;
  for (int i = 1; i < kSumLanes; ++i) sum += shared[i][threadIdx.x];
  y[col] = (accumulate ? y[col] : 0.0f) + sum;
}

inline void add_parts(cudaStream_t stream, float* y, const float* sums, int64_t stride,
                      int64_t cols, bool accumulate = true) {
  const dim3 threads(kSumLanes, kSumLanes);
  add_parts_kernel<<<blocks(cols, kSumLanes), threads, 0, stream>>>(y, sums, stride, cols,
                                                                    accumulate);
  check_launch("add_parts");
}

}  // namespace sbtrain::kernels
