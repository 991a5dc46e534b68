// What the main loops of stick-breaking attention share: their shapes, how blocks of keys come to
// shared memory, and what multiplies the remainder.
#pragma once

#include "kernels/attention/heads.cuh"
#include "kernels/attention/score_stickbreaking.cuh"
#include "kernels/attention/stickbreaking.h"
#include "kernels/attention/tile_products.cuh"
#include "kernels/attention/visibility.cuh"
#include "kernels/primitives/thread_group.cuh"

namespace sbtrain::kernels {

inline constexpr int kStickKeys = 64;  // of a block of keys
inline constexpr int kStickWarps = 4;
using StickHead = Head<StickBreakingProblem>;
using StickThreads = BlockThreads<32 * kStickWarps>;

enum class StickPass { kForward, kQuery, kKey };
template <int kHeadDim, StickPass kPass>
struct StickShape {
  static constexpr int kD = kHeadDim;
  // Blocks of 16 queries in each warp. Two blocks halve the reads of the other operand, but the
  // backward passes are limited by latency, where more warps help more.
  static constexpr int kRowBlocks = kPass == StickPass::kForward && kD <= 64 ? 2 : 1;
  static constexpr int kBlocks = kPass == StickPass::kForward || kD > 64 ? 2 : 3;  // on an SM
  static constexpr int kWarpRows = 16 * kRowBlocks;
  static constexpr int kQueries = kWarpRows * kStickWarps;
};

// With kStopped only the keys that the forward pass read are visible, with kFar those of p.far.
template <bool kStopped, bool kFar = false>
__device__ __forceinline__ Visibility visibility_of(const StickBreakingProblem& p,
                                                    const StickHead& head) {
  return {.tokens = p.tokens,
          .positions = p.positions,
          .cu_seqlens = p.cu_seqlens,
          .sequences = p.sequences,
          .own_key = p.attend_current,
          .stopped = kStopped,
          .stop = p.stop,
          .stop_begin = head.at(0),
          .far = kFar,
          .far_queries = kFar ? p.far.queries : 0,
          .far_key = kFar ? p.far.key : 0,
          .ends_with_pack = true};
}

// The end of the rows whose results are written.
template <bool kFar>
__device__ __forceinline__ int end_row(const StickBreakingProblem& p) {
  return kFar ? p.far.queries : p.tokens;
}
// The end of the keys that the queries before `end` see.
template <bool kFar>
__device__ __forceinline__ int end_key_of_rows(const StickBreakingProblem& p, int end) {
  return kFar ? p.tokens : min(end, p.tokens);
}

// The head's part of row `row` of sums, of queries.
__device__ __forceinline__ float* sum_row(const StickHead& head, const Matrix<float>& x, int row) {
  return x.data + row * x.stride + head.index * head.p.head_dim;
}

// Loads rows [first, first + kRows) of x, in their order.
template <int kRows, int kD>
__device__ __forceinline__ void load_rows(const StickThreads& group, __nv_bfloat16* tile,
                                          const StickHead& head, const HeadRows& x, int first) {
  load_tile<kRows, kD>(group, tile, head.row(x, first), x.stride, head.p.tokens - first,
                       head.p.head_dim);
}

// Loads a block of keys, permuted for the scan.
template <int kD>
__device__ __forceinline__ void load_keys(const StickThreads& group, __nv_bfloat16* tile,
                                          const StickHead& head, const HeadRows& x, int block) {
  constexpr int kChunks = kD / 8;
  constexpr int kStep = StickThreads::kThreads / kChunks;
  const int chunk = group.thread() % kChunks;
#pragma unroll
  for (int n = 0; n < kStickKeys / kStep; ++n) {
    const int row = group.thread() / kChunks + n * kStep;
    const int key = block + key_of_row<kStickKeys>(row);
    const bool valid = key < head.p.tokens && chunk * 8 < head.p.head_dim;
    const __nv_bfloat16* source = valid ? head.row(x, key) + chunk * 8 : x.data;
    cp_async16(shared_address(tile + tile_offset<kD>(row, chunk)), source, valid);
  }
}

// Loads the gates of a block of keys, in the order of the keys.
__device__ __forceinline__ void load_gates(const StickThreads& group, float* gates,
                                           const StickBreakingProblem& p, const StickHead& head,
                                           int block) {
  if (group.thread() >= kStickKeys) return;
  const int key = min(block + group.thread(), p.tokens - 1);
  gates[group.thread()] = p.gate[key * p.gate_stride + head.index];
}

// Two stages of blocks of keys, with their values and gates: one is computed with while the next
// one arrives. Of the widest heads shared memory holds only one.
template <int kD, bool kGated>
class KeyStages {
 public:
  static constexpr int kStages = kD > 128 ? 1 : 2;
  static constexpr int kBytes = 2 * (2 * kStages * kStickKeys * kD) + kStages * kStickKeys * 4;
  __device__ __forceinline__ explicit KeyStages(__nv_bfloat16* memory)
      : k_(memory),
        v_(k_ + kStages * kStickKeys * kD),
        gates_(reinterpret_cast<float*>(v_ + kStages * kStickKeys * kD)) {}
  __device__ __forceinline__ void load(const StickThreads& group, const StickBreakingProblem& p,
                                       const StickHead& head, int block, int stage) const {
    const StickHead key_head = head.of_keys();
    load_keys<kD>(group, k(stage), key_head, p.k, block);
    load_keys<kD>(group, v(stage), key_head, p.v, block);
    if constexpr (kGated) load_gates(group, gates(stage), p, head, block);
    cp_async_commit();
  }
  __device__ __forceinline__ __nv_bfloat16* k(int stage) const {
    return k_ + stage * kStickKeys * kD;
  }
  __device__ __forceinline__ __nv_bfloat16* v(int stage) const {
    return v_ + stage * kStickKeys * kD;
  }
  __device__ __forceinline__ float* gates(int stage) const { return gates_ + stage * kStickKeys; }

 private:
  __nv_bfloat16 *k_, *v_;
  float* gates_;
};

// What the remainder of row `row` multiplies: v_j, r_h or nothing.
__device__ __forceinline__ const __nv_bfloat16* remainder_row(const StickBreakingProblem& p,
                                                              const StickHead& head, int row) {
  if (p.remainder == StickRemainder::kValue) return head.of_keys().row(p.v, row);
  return p.remainder_bias + head.index * p.head_dim;
}

}  // namespace sbtrain::kernels
