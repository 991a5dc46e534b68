#include "kernels/launch.h"
#include "kernels/sampling.h"

namespace sbtrain::kernels {
namespace {

constexpr int kArgmaxThreads = 1024;

struct Candidate {
  float value;
  int index;
  // NaN comes before everything, so that it is found.
  __device__ bool before(const Candidate& other) const {
    if (isnan(value) != isnan(other.value)) return isnan(value);
    if (value != other.value && !isnan(value)) return value > other.value;
    return index < other.index;
  }
};

__device__ Candidate first_of_warp(Candidate best) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const Candidate other{__shfl_xor_sync(~0u, best.value, offset),
                          __shfl_xor_sync(~0u, best.index, offset)};
    if (other.before(best)) best = other;
  }
  return best;
}

// One block for each row.
__global__ void __launch_bounds__(kArgmaxThreads) argmax_kernel(const Argmax p) {
  __shared__ Candidate of_warps[kArgmaxThreads / 32];
  const float* x = p.x.row(blockIdx.x);
  const int vocab = static_cast<int>(p.vocab);
  Candidate best{-INFINITY, INT32_MAX};
#pragma unroll 8
  for (int i = static_cast<int>(threadIdx.x); i < vocab; i += kArgmaxThreads) {
    const Candidate mine{x[i], i};
    if (mine.before(best)) best = mine;
  }
  best = first_of_warp(best);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  best = first_of_warp(of_warps[threadIdx.x]);
  if (threadIdx.x == 0) p.y[blockIdx.x] = isfinite(best.value) ? best.index : -1;
}

}  // namespace

void launch(cudaStream_t stream, const Argmax& p) {
  if (p.rows == 0) return;
  argmax_kernel<<<static_cast<unsigned>(p.rows), kArgmaxThreads, 0, stream>>>(p);
  check_launch("argmax");
}

}  // namespace sbtrain::kernels
