// What the two phases of the stick-breaking backward pass share (sm_90a). They are those of the
// portable loops (mainloop_stickbreaking_backward.cuh), persistent and warp-specialised: one warp
// loads, the other warpgroups compute. Both phases take blocks of 64 keys. The first leaves a state
// for each lane's 16 keys of a block, so that the lanes of the second exchange nothing. Gates are
// in the odds of the keys (score_stickbreaking.cuh).
#pragma once

#include <climits>

#include "kernels/attention/mainloop_stickbreaking_backward.cuh"
#include "kernels/attention/scratch_sizes.h"
#include "kernels/attention/stickbreaking_tiles_hopper.cuh"

namespace sbtrain::kernels {

using HopperGradients = StickGradients<2, kStickKeys, false>;

// The states of 64 rows in a block of keys: of row i of each thread of the warpgroup that has them.
struct alignas(16) TileStates {
  HopperGradients::LaneState of_row[2][128];
};
static_assert(sizeof(TileStates) == 64 * kHopperRowStateBytes);

// The shape of a loop with gates.
template <typename Shape>
struct Gated : Shape {
  static constexpr bool kGated = true;
  // A single consumer can have more registers, and needs them.
  static constexpr int kConsumerRegisters =
      Shape::kConsumers == 1 ? 248 : Shape::kConsumerRegisters;
};

static_assert(sizeof(KeyGates) == kStickKeys * kHopperKeyGateBytes);
template <bool kGated, int kCount>
struct GateBuffers {};
template <int kCount>
struct GateBuffers<true, kCount> {
  KeyGates keys[kCount];
};
// What the scan needs of a buffer's gates.
template <int kCount>
__device__ __forceinline__ LaneGates gates_in(const GateBuffers<true, kCount>& buffers, int n) {
  return {buffers.keys[n]};
}
template <int kCount>
__device__ __forceinline__ NoGates gates_in(const GateBuffers<false, kCount>&, int) {
  return {};
}

// Of the keys that are loaded for `block`. Beyond the pack these are the last ones.
__device__ __forceinline__ KeyGates* gates_of_loaded_keys(KeyGates* gates, int tokens, int head,
                                                          int block) {
  const int blocks = (tokens + kStickKeys - 1) / kStickKeys;
  return gates + static_cast<int64_t>(head) * blocks + min(block / kStickKeys, blocks - 1);
}

// The queries and keys of a launch: all unless given, or a segment of each. A row goes from one
// segment of keys to the next as the state {log2 T, C} and a sum of dq, a key from one segment of
// queries to the next as sums of dk and dv; all in f32, so that segments change no bit of the
// result. Sums of dq are zero where a head begins, those of dk and dv where a segment of keys does;
// the sums of a group's first head go on with its next ones.
//
// With gates, which each head of queries has its own of, the second phase computes one head of each
// group at a time, the `member`, for all queries and keys: sums of dk and dv go from one member to
// the next.
struct HopperSegments {
  int member = 0;  // of its group: the head of queries whose sums are added
  int first_query = 0, end_query = INT_MAX;
  int first_key = 0, end_key = INT_MAX;
  // The first key that any query of the segment sees: beyond the keys there is nothing to do. None
  // where there is one segment.
  const int* lowest = nullptr;
  float2* carries = nullptr;  // [rows]
  float* dq = nullptr;        // [rows, d], as the lanes hold it
  float* dkv = nullptr;       // [heads, 2, dkv_rows, d], the same, from the segment's first key on
  int dkv_rows = 0;           // keys of a segment; where heads form groups, of all of them
  float* dgate = nullptr;     // [heads, dkv_rows, 8], the same, with gates
};

// The gradient of the gates of 64 keys, of a lane (gate_sums_hopper.cuh).
struct GateSums;

struct HopperBackwardArguments {
  StickBreakingProblem p;
  int first_head = 0;         // of the heads of queries that are scheduled
  int rows = 0;               // of the first keys of a head: T, in whole tiles
  int state_rows = 0;         // of its states: the segment's queries, in whole tiles
  int* first_keys = nullptr;  // [workspace_heads, rows], from the first phase
  KeyGates* gates = nullptr;  // [workspace_heads, T / 64], with gates
  HopperSegments part;
  TileScheduler scheduler;
  CUtensorMap q, dout, k, v;  // in phase 1 of tiles of queries, in phase 2 of 64 queries
  __device__ __forceinline__ int* first_key(int head, int row) const {
    return first_keys + static_cast<int64_t>(head - first_head) * rows + row;
  }
  // The place of block `n` of the pack among the states of a row. The blocks that a row sees are at
  // most workspace_blocks neighbours, so each has one of its own, whatever the row's document.
  __device__ __forceinline__ int place(int n) const { return n % p.workspace_blocks; }
  __device__ __forceinline__ KeyGates* gates_of(int head, int block) const {
    return gates_of_loaded_keys(gates, p.tokens, head - first_head, block);
  }
  // The head of queries that the launch computes of the group of a head of keys.
  __device__ __forceinline__ int member_of(int key_head) const {
    return key_head * p.group + part.member;
  }
  // Of a head of keys: sums of the gradient of gates, from key `key` of the segment on.
  __device__ __forceinline__ GateSums* gate_sums(int key_head, int key) const;
  // The states of the 64 rows from `row` on, one of the segment, at a place.
  __device__ __forceinline__ TileStates* states(int head, int place, int row) const {
    const int64_t slot = static_cast<int64_t>(head - first_head) * p.workspace_blocks + place;
    return reinterpret_cast<TileStates*>(p.workspace) + slot * (state_rows / 64) +
           (row - part.first_query) / 64;
  }
};

// Writes what the scan needs of the gates of a block of keys, for each block and head.
template <typename Arguments>
static __global__ void __launch_bounds__(kStickKeys)
    prepare_gates_kernel(const __grid_constant__ Arguments x) {
  const int head = x.first_head + static_cast<int>(blockIdx.y);
  const int block = static_cast<int>(blockIdx.x) * kStickKeys, n = static_cast<int>(threadIdx.x);
  const int key = first_loaded_key<kStickKeys>(block, x.p.tokens) + n;
  const float f = fmaxf(x.p.gate[key * x.p.gate_stride + head], kSmallestGate);
  KeyGates& gates = *x.gates_of(head, block);
  const int place = 4 * (n % 16 / 4 * 4 + n / 16) + n % 4;
  reinterpret_cast<float*>(gates.log2_inverse)[place] = -log2f(f);
  reinterpret_cast<float*>(gates.closed)[place] = (1.0f - f) / f;
}

// Whether any query of the segment sees a key of the segment. A square that has none changes
// nothing: what it would pass on is where it was, and results were written with the last sums.
__device__ __forceinline__ bool segment_is_needed(const HopperSegments& part) {
  return part.lowest == nullptr || *part.lowest < part.end_key;
}

// What a tile has to do with other segments than that of the launch.
struct TileParts {
  static constexpr int kBegun = 1;  // it goes on from where an earlier segment ended
  static constexpr int kMore = 2;   // a later one goes on with it
  static constexpr int kNone = 4;   // nothing of it is in this segment
};

// Sums of 16 rows of a warp, as its lanes hold them: f32 [kD / 8, 32, 4].
template <int kD>
__device__ __forceinline__ void save_sums(float* to, const WarpgroupAccumulator<kD>& x) {
#pragma unroll
  for (int c = 0; c < kD / 8; ++c) {
    const float* const from = x.at[0][c];
    reinterpret_cast<float4*>(to)[32 * c + lane()] =
        make_float4(from[0], from[1], from[2], from[3]);
  }
}
template <int kD>
__device__ __forceinline__ void load_sums(WarpgroupAccumulator<kD>& x, const float* from) {
#pragma unroll
  for (int c = 0; c < kD / 8; ++c) {
    const float4 y = reinterpret_cast<const float4*>(from)[32 * c + lane()];
    float* const to = x.at[0][c];
    to[0] = y.x, to[1] = y.y, to[2] = y.z, to[3] = y.w;
  }
}

template <int kD>
__device__ __forceinline__ void add_sums(WarpgroupAccumulator<kD>& x, const float* from) {
#pragma unroll
  for (int c = 0; c < kD / 8; ++c) {
    const float4 y = reinterpret_cast<const float4*>(from)[32 * c + lane()];
    float* const to = x.at[0][c];
    to[0] += y.x, to[1] += y.y, to[2] += y.z, to[3] += y.w;
  }
}

// What the remainders of a token's heads give to its own value, in the lane's row i of dv.
template <int kD>
__device__ __forceinline__ void add_remainders(const StickBreakingProblem& p,
                                               WarpgroupAccumulator<kD>& dv, int i, int key,
                                               int key_head) {
#pragma unroll 1
  for (int n = 0; n < p.group; ++n) {
    const StickHead head(p, key_head * p.group + n);
    const float rem = exp2_ftz(p.log2_rem[head.at(key)]);
    const __nv_bfloat16* const dout_row = head.row(p.dout, key) + lane_col();
#pragma unroll
    for (int c = 0; c < kD / 8; ++c) {
      dv.at[0][c][2 * i] += rem * __bfloat162float(dout_row[8 * c]);
      dv.at[0][c][2 * i + 1] += rem * __bfloat162float(dout_row[8 * c + 1]);
    }
  }
}
// Writes dk and dv of the warp's 16 rows of a block of 64 keys, from the sums of all queries; keys
// are loaded from `first_key` on, and those left of `block` are another block's.
template <int kD>
__device__ __forceinline__ void write_key_gradients(const StickBreakingProblem& p, int key_head,
                                                    const WarpgroupAccumulator<kD>& dk,
                                                    WarpgroupAccumulator<kD>& dv, int block,
                                                    int first_key) {
  const StickHead head(p, key_head);
  const int warp_row = static_cast<int>(threadIdx.x / 32 % 4 * 16);
  const bool to_value = p.remainder == StickRemainder::kValue;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int key = first_key + key_of_row<kStickKeys>(warp_row + lane_row() + 8 * i);
    if (key < block || key >= p.tokens) continue;
    if (to_value) add_remainders(p, dv, i, key, key_head);
    __nv_bfloat16* const dk_row = head.row(p.dk, key) + lane_col();
    __nv_bfloat16* const dv_row = head.row(p.dv, key) + lane_col();
#pragma unroll
    for (int c = 0; c < kD / 8; ++c) {
      const float* const x = dk.at[0][c] + 2 * i;
      const float* const y = dv.at[0][c] + 2 * i;
      *reinterpret_cast<uint32_t*>(dk_row + 8 * c) = pack_bf16(x[0] * p.scale, x[1] * p.scale);
      *reinterpret_cast<uint32_t*>(dv_row + 8 * c) = pack_bf16(y[0], y[1]);
    }
  }
}

// sum += factor x, of the lane's row i. With kLooks no sum is touched where all of x is zero.
template <int kD, bool kLooks>
__device__ __forceinline__ void add_to_far_row(const Matrix<float>& sums, const StickHead& head,
                                               int key, const WarpgroupAccumulator<kD>& x, int i,
                                               float factor) {
  if constexpr (kLooks) {
    uint32_t bits = 0;
#pragma unroll
    for (int c = 0; c < kD / 8; ++c) {
      const float* const y = x.at[0][c] + 2 * i;
      bits |= __float_as_uint(y[0]) | __float_as_uint(y[1]);
    }
    if (bits == 0) return;
  }
  float* const row = sum_row(head, sums, key) + lane_col();
#pragma unroll
  for (int c = 0; c < kD / 8; ++c) {
    const float* const y = x.at[0][c] + 2 * i;
    float2& sum = *reinterpret_cast<float2*>(row + 8 * c);
    sum = make_float2(fmaf(y[0], factor, sum.x), fmaf(y[1], factor, sum.y));
  }
}
// The same as write_key_gradients() for keys of another rank: adds to far.dk and far.dv. Of keys
// that no query has read the sums stay as they are, if there is a register to tell by.
template <int kD, bool kLooks = true>
__device__ __forceinline__ void add_far_key_gradients(const StickBreakingProblem& p, int key_head,
                                                      const WarpgroupAccumulator<kD>& dk,
                                                      const WarpgroupAccumulator<kD>& dv, int block,
                                                      int first_key) {
  const StickHead head(p, key_head);
  const int warp_row = static_cast<int>(threadIdx.x / 32 % 4 * 16);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int key = first_key + key_of_row<kStickKeys>(warp_row + lane_row() + 8 * i);
    if (key < block || key >= p.tokens) continue;
    add_to_far_row<kD, kLooks>(p.far.dk, head, key, dk, i, p.scale);
    add_to_far_row<kD, kLooks>(p.far.dv, head, key, dv, i, 1.0f);
  }
}

}  // namespace sbtrain::kernels
