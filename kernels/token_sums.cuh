// Sums over tokens, the gradients of per-channel weights. The kernels that read the tokens form
// them in kTokenParts parts, which are added here. The order depends only on the shapes.
#pragma once

#include "kernels/launch.h"
#include "kernels/primitives/dependent_launch.cuh"
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
  let_next_kernel_begin();
  wait_for_previous_kernel();
  __shared__ float shared[kSumLanes][kSumLanes];
  const unsigned x = threadIdx.x % kSumLanes;
  const unsigned first = threadIdx.x / kSumLanes;
  const int64_t col = int64_t{blockIdx.x} * kSumLanes + x;
  float sum = 0.0f;
  if (col < cols) {
#pragma unroll 4
    for (int64_t part = first; part < kTokenParts; part += kSumLanes) {
      sum += sums[part * stride + col];
    }
  }
  shared[first][x] = sum;
  __syncthreads();
  if (first > 0 || col >= cols) return;
  for (int i = 1; i < kSumLanes; ++i) sum += shared[i][x];
  y[col] = (accumulate ? y[col] : 0.0f) + sum;
}

// With `early` it begins before the kernel in front of it has ended (dependent_launch.cuh).
inline void add_parts(cudaStream_t stream, float* y, const float* sums, int64_t stride,
                      int64_t cols, bool accumulate = true, bool early = false) {
  launch_early("add_parts", early, stream, add_parts_kernel,
               {dim3(blocks(cols, kSumLanes)), kSumLanes * kSumLanes}, y, sums, stride, cols,
               accumulate);
}

}  // namespace sbtrain::kernels
