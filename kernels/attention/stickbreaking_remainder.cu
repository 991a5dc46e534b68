// What receives the remainder of a head's stick, by itself: the gradient of the vector that each
// head learns for it, and where ranks share sequences all else too.
#include "kernels/attention/heads.cuh"
#include "kernels/attention/stickbreaking_remainder.h"
#include "kernels/pack.cuh"
#include "kernels/primitives/dependent_launch.cuh"
#include "kernels/primitives/math.cuh"
#include "kernels/token_sums.cuh"

namespace sbtrain::kernels {
namespace {

inline constexpr int kThreads = 256;
inline constexpr int kWidth = 8;  // channels of a thread

// sums [kTokenParts, H, d] = the sum over a part's rows of rem_j do_j. A block has one part and one
// head; its threads are [rows, channels].
__global__ void __launch_bounds__(kThreads)
    remainder_vector_kernel(const StickBreakingProblem p, float* sums) {
  __shared__ Pack<float, kWidth> shared[kThreads];
  const int part = static_cast<int>(blockIdx.x);
  const Head head(p, static_cast<int>(blockIdx.y), 0);
  const int thread = static_cast<int>(threadIdx.x);
  const int packs = p.head_dim / kWidth;
  const int rows = kThreads / packs;
  const int first = thread / packs;
  const int col = thread % packs * kWidth;
  Pack<float, kWidth> sum{};
  if (first < rows) {
    const auto end = static_cast<int>(first_row(p.tokens, part + 1));
    for (int row = static_cast<int>(first_row(p.tokens, part)) + first; row < end; row += rows) {
      const float rem = exp2_ftz(p.log2_rem[head.at(row)]);
      const auto dout = load_floats<kWidth>(head.row(p.dout, row) + col);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum[i] += rem * dout[i];
    }
  }
  shared[thread] = sum;
  __syncthreads();
  if (thread >= p.head_dim) return;
  float total = 0.0f;
  for (int i = 0; i < rows; ++i) {
    total += shared[i * packs + thread / kWidth][thread % kWidth];
  }
  sums[(int64_t{part} * p.heads + head.index) * p.head_dim + thread] = total;
}

// ---- After the keys of all ranks: a thread has kWidth channels of one row and head --------------

using StickHead = Head<StickBreakingProblem>;

// Where a thread's channels lie: their row, their head and the first one of them in it.
struct Place {
  int row, head, col;
};
inline __device__ Place place_of(int64_t index, int heads, int packs) {
  const int64_t in_heads = index / packs;
  return {static_cast<int>(in_heads / heads), static_cast<int>(in_heads % heads),
          static_cast<int>(index % packs) * kWidth};
}

// kWidth channels of v_j or r_h.
inline __device__ Pack<float, kWidth> receiver(const StickHead& head, int row, int col) {
  const StickBreakingProblem& p = head.p;
  if (p.remainder == StickRemainder::kBias) {
    return load_floats<kWidth>(p.remainder_bias + head.index * p.head_dim + col);
  }
  return load_floats<kWidth>(head.of_keys().row(p.v, row) + col);
}

// Sums are aligned to 8 bytes.
inline __device__ void add_to_sums(float* sums, const Pack<float, kWidth>& x) {
#pragma unroll
  for (int i = 0; i < kWidth; i += 2) {
    float2* const pair = reinterpret_cast<float2*>(sums + i);
    *pair = make_float2(pair->x + x[i], pair->y + x[i + 1]);
  }
}

__global__ void __launch_bounds__(kThreads) add_remainder_kernel(const StickBreakingProblem p) {
  const int packs = p.head_dim / kWidth;
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= int64_t{p.tokens} * p.heads * packs) return;
  const Place at = place_of(index, p.heads, packs);
  const StickHead head(p, at.head);
  const float rem = exp2_ftz(p.log2_rem[head.at(at.row)]);
  Pack<float, kWidth> x = receiver(head, at.row, at.col);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) x[i] *= rem;
  add_to_sums(p.far.o.data + at.row * p.far.o.stride + at.head * p.head_dim + at.col, x);
}

// A thread has a row and a head.
__global__ void __launch_bounds__(kThreads)
    remainder_gradient_kernel(const StickBreakingProblem p) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= int64_t{p.tokens} * p.heads) return;
  const Place at = place_of(index, p.heads, 1);
  const StickHead head(p, at.head);
  float sum = 0.0f;
  for (int col = 0; col < p.head_dim; col += kWidth) {
    const Pack<float, kWidth> x = receiver(head, at.row, col);
    const auto dout = load_floats<kWidth>(head.row(p.dout, at.row) + col);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum += x[i] * dout[i];
  }
  p.far.w[head.at(at.row)] = sum;
}

// A thread has a head of values.
__global__ void __launch_bounds__(kThreads) remainder_values_kernel(const StickBreakingProblem p) {
  const int packs = p.head_dim / kWidth;
  const int key_heads = p.heads / p.group;
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= int64_t{p.tokens} * key_heads * packs) return;
  const Place at = place_of(index, key_heads, packs);
  Pack<float, kWidth> sum{};
  for (int n = 0; n < p.group; ++n) {
    const StickHead head(p, at.head * p.group + n);
    const float rem = exp2_ftz(p.log2_rem[head.at(at.row)]);
    const auto dout = load_floats<kWidth>(head.row(p.dout, at.row) + at.col);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum[i] += rem * dout[i];
  }
  add_to_sums(p.far.dv.data + at.row * p.far.dv.stride + at.head * p.head_dim + at.col, sum);
}

// Launches a kernel with `count` threads.
void launch_threads(const char* name, cudaStream_t stream, void (*kernel)(StickBreakingProblem),
                    int64_t count, const StickBreakingProblem& p) {
  if (count == 0) return;
  launch_early(name, /*early=*/false, stream, kernel, {dim3(blocks(count, kThreads)), kThreads}, p);
}

}  // namespace

void stickbreaking_add_remainder(cudaStream_t stream, const StickBreakingProblem& p) {
  launch_threads("stickbreaking_add_remainder", stream, add_remainder_kernel,
                 int64_t{p.tokens} * p.heads * (p.head_dim / kWidth), p);
}

void stickbreaking_remainder_gradient(cudaStream_t stream, const StickBreakingProblem& p) {
  launch_threads("stickbreaking_remainder_gradient", stream, remainder_gradient_kernel,
                 int64_t{p.tokens} * p.heads, p);
}

void stickbreaking_remainder_values(cudaStream_t stream, const StickBreakingProblem& p) {
  launch_threads("stickbreaking_remainder_values", stream, remainder_values_kernel,
                 int64_t{p.tokens} * (p.heads / p.group) * (p.head_dim / kWidth), p);
}

void stickbreaking_remainder_vector(cudaStream_t stream, const StickBreakingProblem& p) {
  if (p.tokens == 0) return;
  const dim3 grid(kTokenParts, static_cast<unsigned>(p.heads));
  launch_early("stickbreaking_remainder_vector", /*early=*/false, stream, remainder_vector_kernel,
               {grid, kThreads}, p, p.workspace);
  const int64_t cols = int64_t{p.heads} * p.head_dim;
  add_parts(stream, p.dremainder_bias, p.workspace, cols, cols);
}

}  // namespace sbtrain::kernels
