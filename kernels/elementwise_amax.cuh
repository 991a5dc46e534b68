// Elementwise ops that also find the largest absolute value of what they write (ops/fp8.h).
#pragma once

#include "kernels/amax.cuh"
#include "kernels/elementwise.cuh"

namespace sbtrain::kernels {

// elementwise_kernel for an op whose store() returns the bits of the largest |x| that it wrote
// (amax.cuh).
template <int kWidth, typename Op>
__global__ void __launch_bounds__(kElementwiseThreads)
    elementwise_amax_kernel(float* amax, int64_t packs, int64_t packs_per_row, const Op op) {
  constexpr int kPacks = kPacksPerThread<kWidth, Op>;
  const int64_t first = int64_t{blockIdx.x} * kElementwiseThreads * kPacks + threadIdx.x;
  decltype(op.template load<kWidth>(0, 0)) loaded[kPacks];
  Position at[kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    const int64_t pack = first + k * kElementwiseThreads;
    if (pack >= packs) continue;
    at[k] = pack_position<kWidth>(pack, packs_per_row);
    loaded[k] = op.template load<kWidth>(at[k].row, at[k].col);
  }
  unsigned largest = 0;
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    if (first + k * kElementwiseThreads >= packs) continue;
    largest = max(largest, op.template store<kWidth>(at[k].row, at[k].col, loaded[k]));
  }
  raise_amax(amax, largest);
}

// launch_elementwise with *amax = the largest |x| that the op writes.
template <int kWidth, typename Op>
void launch_elementwise_amax(cudaStream_t stream, const char* name, float* amax, int64_t rows,
                             int64_t cols, bool vectors, const Op& op) {
  clear_amax(name, stream, amax);
  if (rows == 0 || cols == 0) return;
  with_width<kWidth>(vectors && cols % kWidth == 0, [&](auto width) {
    constexpr int kPackWidth = decltype(width)::value;
    constexpr int64_t kPerBlock = kElementwiseThreads * kPacksPerThread<kPackWidth, Op>;
    const int64_t packs = rows * (cols / kPackWidth);
    elementwise_amax_kernel<kPackWidth>
        <<<blocks(packs, kPerBlock), kElementwiseThreads, 0, stream>>>(amax, packs,
                                                                       cols / kPackWidth, op);
  });
  check_launch(name);
}

}  // namespace sbtrain::kernels
