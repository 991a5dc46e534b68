#include <cmath>

#include "kernels/pack.cuh"
#include "kernels/primitives/dependent_launch.cuh"
#include "kernels/rope.h"
#include "kernels/rope_turns.cuh"

namespace sbtrain::kernels {
namespace {

constexpr int kRopeThreads = 256;

// A thread rotates kWidth neighbouring frequencies of one row in all heads of a part, so that their
// sines are computed once.
template <int kWidth, bool kByLength>
__global__ void __launch_bounds__(kRopeThreads) rope_kernel(const __grid_constant__ Rope p) {
  let_next_kernel_begin();
  const int half = p.rotated / 2;
  const int threads_per_row = half / kWidth;
  const int64_t task = int64_t{blockIdx.x} * kRopeThreads + threadIdx.x;
  const int64_t row = task / threads_per_row;
  if (row >= p.rows) return wait_for_previous_kernel();
  const int first = static_cast<int>(task - row * threads_per_row) * kWidth;
  const double position = p.positions[row];
  const RowTurns<kByLength> turns_of(p, row);
  float sine[kWidth];
  float cosine[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const double turns = position * turns_of[first + i];
    sincospif(2.0f * static_cast<float>(turns - rint(turns)), &sine[i], &cosine[i]);
  }
  wait_for_previous_kernel();
  bf16* x = p.x.row(row) + first;
  constexpr int kBatch = 4;  // heads whose loads are in flight
  const int heads_of_part =
      (p.heads + static_cast<int>(gridDim.y) - 1) / static_cast<int>(gridDim.y);
  const int first_head = static_cast<int>(blockIdx.y) * heads_of_part;
  const int end = min(p.heads, first_head + heads_of_part);
  for (int head = first_head; head < end; head += kBatch) {
    Pack<bf16, kWidth> x1[kBatch];
    Pack<bf16, kWidth> x2[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (head + b >= end) continue;
      x1[b] = load_pack<kWidth>(x + (head + b) * p.head_dim);
      x2[b] = load_pack<kWidth>(x + (head + b) * p.head_dim + half);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (head + b >= end) continue;
      auto y1 = convert<float>(x1[b]);
      auto y2 = convert<float>(x2[b]);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float left = y1[i];
        const float right = y2[i];
        y1[i] = left * cosine[i] - right * sine[i];
        y2[i] = right * cosine[i] + left * sine[i];
      }
      store_floats(x + (head + b) * p.head_dim, y1);
      store_floats(x + (head + b) * p.head_dim + half, y2);
    }
  }
}

}  // namespace

void launch(cudaStream_t stream, const Rope& p) {
  if (p.rotated % 2 != 0 || p.rotated / 2 > kMaxRopeFrequencies || p.rotated > p.head_dim) {
    throw_invalid_argument(
        "rope: of %d channels of a head an even number must be rotated, at most %d, got %d",
        static_cast<int>(p.head_dim), static_cast<int>(2 * kMaxRopeFrequencies),
        static_cast<int>(p.rotated));
  }
  if (p.rows == 0 || p.heads == 0 || p.rotated == 0) return;
  const int half = p.rotated / 2;
  with_width<8>(half % 8 == 0 && p.head_dim % 8 == 0 && vectors_fit<8>(p.x), [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    const unsigned of_rows = blocks(p.rows * (half / kWidth), kRopeThreads);
    // One block for all rows would go through the heads alone.
    const unsigned parts = of_rows == 1 ? blocks(p.heads, 4) : 1;
    const auto kernel =
        p.lengths != nullptr ? rope_kernel<kWidth, true> : rope_kernel<kWidth, false>;
    launch_early("rope", p.early, stream, kernel, {dim3(of_rows, parts), kRopeThreads}, p);
  });
}

}  // namespace sbtrain::kernels
