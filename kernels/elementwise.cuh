// Ops that read and write one pack of a [rows, cols] matrix independently of all others.
#pragma once

#include <utility>

#include "kernels/pack.cuh"
#include "kernels/primitives/dependent_launch.cuh"

namespace sbtrain::kernels {

inline constexpr int kElementwiseThreads = 256;

struct Position {
  int64_t row, col;
};

template <int kWidth>
__device__ Position pack_position(int64_t pack, int64_t packs_per_row) {
  if (pack < packs_per_row) return {0, pack * kWidth};
  if (pack <= UINT32_MAX) {  // the 64-bit division is several times as slow
    const auto row = static_cast<uint32_t>(pack) / static_cast<uint32_t>(packs_per_row);
    return {row, (pack - row * packs_per_row) * kWidth};
  }
  const int64_t row = pack / packs_per_row;
  return {row, (pack - row * packs_per_row) * kWidth};
}

// An Op has `auto load<kWidth>(row, col) const` and `void store<kWidth>(row, col, loaded) const`.
// Loads of several packs are in flight, about 64 bytes a thread, before the first is stored. An
// op may work in place: a thread stores only where no other thread loads.
template <int kWidth, typename Op>
inline constexpr int kPacksPerThread = [] {
  constexpr size_t kBytes = sizeof(std::declval<Op>().template load<kWidth>(0, 0));
  return kBytes <= 16 ? 4 : kBytes <= 32 ? 2 : 1;
}();

template <int kWidth, typename Op, bool kEarly = false>
__global__ void __launch_bounds__(kElementwiseThreads)
    elementwise_kernel(int64_t packs, int64_t packs_per_row, const Op op) {
  constexpr int kPacks = kPacksPerThread<kWidth, Op>;
  if constexpr (kEarly) {
    let_next_kernel_begin();
    wait_for_previous_kernel();
  }
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
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    if (first + k * kElementwiseThreads >= packs) continue;
    op.template store<kWidth>(at[k].row, at[k].col, loaded[k]);
  }
}

// `vectors`: whether all of the op's rows can be read kWidth elements at a time.
template <int kWidth, typename Op>
void launch_elementwise(cudaStream_t stream, const char* name, int64_t rows, int64_t cols,
                        bool vectors, const Op& op) {
  if (rows == 0 || cols == 0) return;
  with_width<kWidth>(vectors && cols % kWidth == 0, [&](auto width) {
    constexpr int kPackWidth = decltype(width)::value;
    constexpr int64_t kPerBlock = kElementwiseThreads * kPacksPerThread<kPackWidth, Op>;
    const int64_t packs = rows * (cols / kPackWidth);
    elementwise_kernel<kPackWidth><<<blocks(packs, kPerBlock), kElementwiseThreads, 0, stream>>>(
        packs, cols / kPackWidth, op);
  });
  check_launch(name);
}

// The same for an op that may begin before the kernel in front of it has ended.
template <int kWidth, typename Op>
void launch_elementwise_early(cudaStream_t stream, const char* name, int64_t rows, int64_t cols,
                              bool vectors, const Op& op) {
  if (rows == 0 || cols == 0) return;
  with_width<kWidth>(vectors && cols % kWidth == 0, [&](auto width) {
    constexpr int kPackWidth = decltype(width)::value;
    constexpr int64_t kPerBlock = kElementwiseThreads * kPacksPerThread<kPackWidth, Op>;
    const int64_t packs = rows * (cols / kPackWidth);
    launch_early(name, /*early=*/true, stream, elementwise_kernel<kPackWidth, Op, true>,
                 {dim3(blocks(packs, kPerBlock)), kElementwiseThreads}, packs, cols / kPackWidth,
                 op);
  });
}

}  // namespace sbtrain::kernels
