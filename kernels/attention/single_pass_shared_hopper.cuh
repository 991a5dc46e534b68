// What all warps of the stick-breaking backward pass in a single pass share (sm_90a): its shapes,
// its arguments and shared memory. mainloop_stickbreaking_single_pass_hopper.cuh says how it works.
#pragma once

#include "kernels/attention/gate_sums_hopper.cuh"
#include "kernels/primitives/flag.cuh"

namespace sbtrain::kernels {

template <int kHeadDim>
struct SinglePassShape {
  static constexpr int kD = kHeadDim;
  static constexpr bool kFolded = false;
  static constexpr bool kGated = false;
  static constexpr bool kFar = false;
  static constexpr int kConsumers = 3;
  static constexpr int kKeys = kStickKeys * kConsumers;
  static_assert(kKeys == kSinglePassKeys);
  static constexpr int kQueries = kSinglePassQueries;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kStages = kConsumers;  // the consumer of this number computes dq
  static constexpr int kScoreTiles = 2;       // of A and dz
  static constexpr int kProducerRegisters = 32;
  static constexpr int kConsumerRegisters = 160;
};

// Where `taken` begins if no place is seen, in each of its bytes: far beyond the last one.
inline constexpr int kNothingSeen = 0x7f;

// The counters begin where begin_single_pass_kernel() sets them. [H] are the heads of the launch.
struct SinglePassArguments {
  StickBreakingProblem p;
  float scale_log2 = 1.0f;    // of q k^T, where it is not folded into the queries
  int first_head = 0;         // of the launch
  int heads = 0;              // of the launch
  int tiles = 0;              // of 64 queries
  int places = 0;             // of 192 keys
  int* taken = nullptr;       // the next block of keys: place * heads + head
  int* first_keys = nullptr;  // [H, 64 tiles]: that each row sees
  float2* states = nullptr;   // {log2 T, C} [H, 64 tiles], at the left of the place that is next
  int* next = nullptr;        // [H, tiles]: the place that is next to take the states
  int* next_dq = nullptr;     // [H, tiles]: and to add to dq
  float* dq = nullptr;        // [H, tiles, 64 d], as the lanes hold it (save_sums)
  KeyGates* gates = nullptr;  // [H, T / 64], with gates
  float* dkv = nullptr;       // [H, 2, places, 192 d], the same, where heads share keys and values
  CUtensorMap q, dout, k, v;  // of 64 queries or keys
  __device__ __forceinline__ int tile(int head, int tile) const {
    return (head - first_head) * tiles + tile;
  }
  __device__ __forceinline__ KeyGates* gates_of(int head, int block) const {
    return gates_of_loaded_keys(gates, p.tokens, head - first_head, block);
  }
  // Of the warp's 16 rows of a block of 64 keys: dk (0) or dv (1).
  template <int kD>
  __device__ __forceinline__ float* sums_of(int head, int block, int which) const {
    const int row = block + static_cast<int>(threadIdx.x / 32 % 4 * 16);
    const int64_t rows = int64_t{places} * kSinglePassKeys;
    return dkv + ((2 * (head - first_head) + which) * rows + row) * kD;
  }
};

// A block of 192 keys, and the last tile of queries that sees it.
struct SinglePassTile : KeyTile {
  int place = 0;
  int last = -1;  // < 0: no query sees a key
};
__device__ __forceinline__ SinglePassTile uniform(const SinglePassTile& x) {
  return {uniform(static_cast<const KeyTile&>(x)), uniform(x.place), uniform(x.last)};
}

// What a warp has no register for.
struct WarpBlock {
  int head;         // of a consumer
  uint32_t parity;  // of the phase of the barriers in which the block of keys comes
};

template <typename Shape>
struct SinglePassShared {
  static constexpr int kD = Shape::kD, kStages = Shape::kStages, kConsumers = Shape::kConsumers;
  static constexpr int kQueries = Shape::kQueries;
  alignas(1024) __nv_bfloat16 k[kConsumers][kStickKeys * kD];
  alignas(1024) __nv_bfloat16 v[kConsumers][kStickKeys * kD];
  alignas(1024) __nv_bfloat16 q[kStages][kQueries * kD];
  alignas(1024) __nv_bfloat16 dout[kStages][kQueries * kD];
  alignas(1024) __nv_bfloat16 a[Shape::kScoreTiles][kConsumers][kQueries * kStickKeys];
  alignas(1024) __nv_bfloat16 dz[Shape::kScoreTiles][kConsumers][kQueries * kStickKeys];
  alignas(128) float dq[kQueries * kD];
  // Of each row: log2 of what the keys of each consumer leave of the stick, and what they add to C.
  // The fourth numbers are the state that comes from the left, log2 T and C.
  alignas(16) float logs[kStages][kQueries][4];
  alignas(16) float sums[kStages][kQueries][4];
  alignas(16) int first_keys[kStages][kQueries];
  int next_tile[kStages];  // that sees the keys; < 0: there are no more
  Pipeline<1> keys, tiles;
  Pipeline<kStages> queries;
  Mbarrier arrived[kStages];                    // the states have
  Mbarrier handed[kStages];                     // logs and sums are complete
  Mbarrier differentiated[Shape::kScoreTiles];  // dz of all keys is complete
  Pipeline<1> staged;                           // dq
  SinglePassTile tile;
  WarpBlock warps[Shape::kThreads / 32];
  GateBuffers<Shape::kGated, kConsumers> gates;
  GateSumBuffers<Shape::kGated, kConsumers> gate_sums;

  __device__ __forceinline__ WarpBlock& my_block() { return warps[reread_thread() / 32]; }
  __device__ __forceinline__ PipelineState<1> block_state() {
    // The same in all lanes, which the compiler has to know.
    return {static_cast<uint32_t>(uniform(static_cast<int>(my_block().parity)))};
  }
  __device__ __forceinline__ void advance_block() {
    if (lane() == 0) my_block().parity ^= 1;
    __syncwarp();
  }
  __device__ __forceinline__ void init() {
    constexpr int kWarps = 4 * kConsumers;
    tiles.init(1, kWarps + 3);
    keys.init(1, kWarps);
    queries.init(1, kWarps + 3);
    for (int i = 0; i < kStages; ++i) {
      arrived[i].init(1);
      handed[i].init(kWarps);
    }
    for (Mbarrier& barrier : differentiated) barrier.init(kWarps);
    staged.init(4, 1);
    for (WarpBlock& warp : warps) warp.parity = 0;
  }
};

}  // namespace sbtrain::kernels
