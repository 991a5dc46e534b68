// The gradient of the gates in the stick-breaking backward pass (sm_90a), which the loop of two
// phases and that of a single pass add up alike.
#pragma once

#include "kernels/attention/stickbreaking_backward_hopper.cuh"

namespace sbtrain::kernels {

// The gradient of the gates of 64 keys: sums of y (score_stickbreaking.cuh) over the rows of a
// warp. In registers of its own a lane would need one for each of its 16 keys; tensor cores put the
// sums of all lanes in four, and these stay in shared memory between the tiles. With the transposed
// of y at the left, and at the right the matrix whose column c is 1, row m of column c of the sums
// is that of column 16 c + m of the tile.
struct alignas(16) GateSums {
  float at[4];
  // Pairs of y, rounded to bf16: of keys 4 c, 4 c + 1 and 4 c + 2, 4 c + 3 of the lane.
  __device__ __forceinline__ void add(int c, uint32_t left, uint32_t right) {
    constexpr uint32_t kOnes = 0x3f803f80;  // a pair
    mma_m16n8k8_bf16(at, transpose_8x8(left), transpose_8x8(right), lane() / 4 == c ? kOnes : 0);
  }
  // The sum of a key of the block, from those of a warp's lanes.
  static __device__ __forceinline__ float of_key(const GateSums* lanes, int key) {
    const int column = key % 16 / 2 * 8 + key / 16 * 2 + key % 2;  // key_of_row(column) is the key
    const int c = column / 16, m = column % 16;
    return lanes[m % 8 * 4 + c / 2].at[m / 8 * 2 + c % 2];
  }
};
__device__ __forceinline__ GateSums* HopperBackwardArguments::gate_sums(int key_head,
                                                                        int key) const {
  const int head = key_head - first_head / p.group;
  return reinterpret_cast<GateSums*>(part.dgate) + 2 * (int64_t{head} * part.dkv_rows + key);
}
// dgate of key n of the 64 loaded for the block from `begin` on, if it is one of the block: the
// sums of its four warps, in their order, divided by the gate.
__device__ __forceinline__ void write_gate_gradient(const StickBreakingProblem& p, int head,
                                                    int begin, int n, const GateSums* sums) {
  const int key = first_loaded_key<kStickKeys>(begin, p.tokens) + n;
  if (key < begin || key >= p.tokens) return;
  float sum = 0.0f;
  for (int warp = 0; warp < 4; ++warp) sum += GateSums::of_key(sums + 32 * warp, n);
  const float f = fmaxf(p.gate[key * p.gate_stride + head], kSmallestGate);
  p.dgate[key * p.dgate_stride + head] = __float2bfloat16(sum * reciprocal_ftz(f));
}

template <bool kGated, int kConsumers>
struct GateSumBuffers {};
template <int kConsumers>
struct GateSumBuffers<true, kConsumers> {
  GateSums of_thread[kConsumers][128];
};

}  // namespace sbtrain::kernels
