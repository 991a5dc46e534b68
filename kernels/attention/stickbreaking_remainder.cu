// The gradient of the vector that each head learns for the remainder of its stick.
#include "kernels/attention/heads.cuh"
#include "kernels/attention/stickbreaking.h"
#include "kernels/pack.cuh"
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

}  // namespace

void stickbreaking_remainder_vector(cudaStream_t stream, const StickBreakingProblem& p) {
  if (p.tokens == 0) return;
  const dim3 grid(kTokenParts, static_cast<unsigned>(p.heads));
  remainder_vector_kernel<<<grid, kThreads, 0, stream>>>(p, p.workspace);
  check_launch("stickbreaking_remainder_vector");
  const int64_t cols = int64_t{p.heads} * p.head_dim;
  add_parts(stream, p.dremainder_bias, p.workspace, cols, cols);
}

}  // namespace sbtrain::kernels
