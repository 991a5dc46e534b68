#include <cfloat>

#include "kernels/cross_entropy.h"
#include "kernels/pack.cuh"
#include "kernels/reduce.cuh"

namespace sbtrain::kernels {
namespace {

// For long rows, one block at a time on each multiprocessor: with two, their rows would not stay in
// L2 between their first and second reading. Short rows stay there in any case, and take as long as
// the barriers between the warps of a block: so these are few.
constexpr int kLongRow = 8192;  // elements, at least
constexpr int kLongRowThreads = 1024;
constexpr int kShortRowThreads = 256;

template <int kThreads>
__device__ float block_max(float x) {
  __shared__ float maxima[kThreads / 32];
  for (int offset = 16; offset > 0; offset /= 2) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
  }
  if (threadIdx.x % 32 == 0) maxima[threadIdx.x / 32] = x;
  __syncthreads();
  for (int warp = 0; warp < kThreads / 32; ++warp) x = fmaxf(x, maxima[warp]);
  return x;
}

struct Softmax {
  float max;
  float sum;  // of exp(logit - max)
};

// One pass: each thread rescales its sum when its maximum grows. A logit that is NaN or infinite
// makes the sum NaN.
template <int kThreads, int kWidth>
__device__ Softmax softmax(const float* logits, int64_t vocab) {
  float max = -FLT_MAX;
  float sum = 0.0f;
#pragma unroll 4
  for (int64_t col = threadIdx.x * kWidth; col < vocab; col += kThreads * kWidth) {
    const auto z = load_pack<kWidth>(logits + col);
    float larger = max;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) larger = fmaxf(larger, z[i]);
    sum *= __expf(max - larger);
    max = larger;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum += __expf(z[i] - max);
  }
  const float row_max = block_max<kThreads>(max);
  float sums[1] = {sum * __expf(max - row_max)};
  group_sum<kThreads>(sums);
  return {row_max, sums[0]};
}

// Whether the target's logit is larger than all others; the same on all threads.
template <int kThreads>
__device__ bool is_largest(const float* logits, int64_t vocab, int32_t target) {
  const float z = logits[target];
  bool rivalled = false;
  for (int64_t col = threadIdx.x; col < vocab; col += kThreads) {
    rivalled |= col != target && !(logits[col] < z);
  }
  return !__syncthreads_or(rivalled);
}

template <int kThreads, int kWidth>
__global__ void __launch_bounds__(kThreads) cross_entropy_kernel(const CrossEntropy p) {
  const int64_t row = blockIdx.x;
  const float* logits = p.logits.row(row);
  bf16* dlogits = p.dlogits.row(row);
  const int32_t target = p.targets[row];
  const bool ignored = target < 0;
  require(target < p.vocab);
  float max = 0.0f;
  float factor = 0.0f;
  if (!ignored) {
    const Softmax s = softmax<kThreads, kWidth>(logits, p.vocab);
    const float lse = s.max + logf(s.sum);
    max = s.max;
    factor = (1.0f + 2.0f * p.z_loss * lse) * p.loss_weight / s.sum;
    if (threadIdx.x == 0) {  // in double: a small loss is the difference of large numbers
      const double exact = static_cast<double>(s.max) + log(static_cast<double>(s.sum));
      p.loss[row] = static_cast<float>(exact - static_cast<double>(logits[target]));
    }
  } else if (threadIdx.x == 0) {
    p.loss[row] = 0.0f;
  }
  if (p.hits != nullptr) {
    const bool hit = !ignored && is_largest<kThreads>(logits, p.vocab, target);
    if (threadIdx.x == 0) p.hits[row] = hit ? 1.0f : 0.0f;
  }
  if (p.dlogits.data == nullptr) return;
#pragma unroll 2
  for (int64_t col = threadIdx.x * kWidth; col < p.vocab; col += kThreads * kWidth) {
    Pack<float, kWidth> dz{};
    if (!ignored) {
      dz = load_pack<kWidth>(logits + col);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        dz[i] = factor * __expf(dz[i] - max) - (col + i == target ? p.loss_weight : 0.0f);
      }
    }
    store_floats(dlogits + col, dz);
  }
}

}  // namespace

void launch(cudaStream_t stream, const CrossEntropy& p) {
  if (p.rows == 0) return;
  const bool vectors = p.vocab % 4 == 0 && vectors_fit<4>(p.logits, p.dlogits);
  const auto rows = static_cast<unsigned>(p.rows);
  with_width<4>(vectors, [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    if (p.vocab < kLongRow) {
      cross_entropy_kernel<kShortRowThreads, kWidth><<<rows, kShortRowThreads, 0, stream>>>(p);
    } else {
      cross_entropy_kernel<kLongRowThreads, kWidth><<<rows, kLongRowThreads, 0, stream>>>(p);
    }
  });
  check_launch("cross_entropy");
}

}  // namespace sbtrain::kernels
