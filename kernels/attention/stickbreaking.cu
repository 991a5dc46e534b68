// Tiles are aligned to the pack, not to the documents, so the grid does not depend on the packing:
// query j sees the keys [document start, j), or [.., j] with attend_current. Blocks of scores in
// which some query does not see some key are masked, those in which no query sees any are left out.
//
// The backward pass has two phases. Both form A and dz again, block by block from left to right.
// The first has a tile of queries walk over its key blocks: it finds dq, and leaves {log2 T, C} of
// each row at each block. From these the second starts in any block: a block of keys walks over the
// queries that see it and finds dk and dv. Nothing is added by atomics.
#include <climits>
#include <type_traits>

#include "kernels/attention/document_end.cuh"
#include "kernels/attention/stickbreaking.h"
#include "kernels/attention/stickbreaking_scan.cuh"

namespace sbtrain::kernels {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kKeys = kStickKeys;

enum class Pass { kForward, kQuery, kKey };
template <int kHeadDim, Pass kPass>
struct Shape {
  static constexpr int kD = kHeadDim;
  // Of 16 queries, each warp. Two halve the reads of the other operand, but the backward passes
  // are bound by latency: there more warps count for more.
  static constexpr int kRowBlocks = kPass == Pass::kForward && kD <= 64 ? 2 : 1;
  static constexpr int kBlocks = kPass == Pass::kForward || kD > 64 ? 2 : 3;  // on an SM
  static constexpr int kWarpRows = 16 * kRowBlocks;
  static constexpr int kQueries = kWarpRows * kWarps;
};

__device__ __forceinline__ int thread() {
  return static_cast<int>(threadIdx.x);
}
__device__ __forceinline__ int lane_row(int i) {  // row i of the lane's, in its warp
  return kernels::lane_row() + 8 * i;
}

struct Head {
  __device__ __forceinline__ Head(const StickBreakingProblem& p, int index) : p(p), index(index) {}
  __device__ __forceinline__ __nv_bfloat16* row(const HeadRows& x, int row) const {
    return x.data + row * x.stride + index * p.head_dim;
  }
  __device__ __forceinline__ int64_t at(int row) const {
    return static_cast<int64_t>(index) * p.tokens + row;
  }
  const StickBreakingProblem& p;
  int index;
};

// What the rows of one warp see.
template <int kRowBlocks, bool kStopped>
struct SeenKeys {
  RowRanges<kRowBlocks> rows;
  int lowest, highest;      // first keys of the warp's first and last row
  int first_end, last_end;  // where the keys of these rows end
  __device__ __forceinline__ SeenKeys(const Head& head, int first) {
#pragma unroll
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      const int row = first + lane_row(i);
      rows.begin[i] = begin(head, row);
      rows.end[i] = end(head, row);
    }
    lowest = begin(head, first);
    highest = begin(head, first + 16 * kRowBlocks - 1);
    first_end = end(head, first);
    last_end = end(head, first + 16 * kRowBlocks - 1);
  }
  // The document's start, or with kStopped what the forward pass read; rows behind the pack see
  // nothing.
  static __device__ __forceinline__ int begin(const Head& head, int row) {
    if (row >= head.p.tokens) return INT_MAX;
    const int start = row - head.p.positions[row];
    return kStopped ? start + head.p.stop[head.at(row)] : start;
  }
  static __device__ __forceinline__ int end(const Head& head, int row) {
    return min(row + (head.p.attend_current ? 1 : 0), head.p.tokens);
  }
  __device__ __forceinline__ bool some(int block) const {
    return block < last_end && block + kKeys > lowest;
  }
  __device__ __forceinline__ bool all(int block) const {
    return block + kKeys <= first_end && block >= highest;
  }
};

// Rows [first, first + kRows) of x, in their order.
template <int kRows, int kD>
__device__ __forceinline__ void load_rows(__nv_bfloat16* tile, const Head& head, const HeadRows& x,
                                          int first) {
  load_tile<kRows, kD, kThreads>(tile, head.row(x, first), x.stride, head.p.tokens - first,
                                 head.p.head_dim);
}

// A block of keys, permuted for the scan.
template <int kD>
__device__ __forceinline__ void load_keys(__nv_bfloat16* tile, const Head& head, const HeadRows& x,
                                          int block) {
  constexpr int kChunks = kD / 8;
  constexpr int kStep = kThreads / kChunks;
  const int chunk = thread() % kChunks;
#pragma unroll
  for (int n = 0; n < kKeys / kStep; ++n) {
    const int row = thread() / kChunks + n * kStep;
    const int key = block + key_of_row(row);
    const bool valid = key < head.p.tokens && chunk * 8 < head.p.head_dim;
    const __nv_bfloat16* source = valid ? head.row(x, key) + chunk * 8 : x.data;
    cp_async16(shared_address(tile + tile_offset<kD>(row, chunk)), source, valid);
  }
}

// Gates of a block of keys, in the order of the keys: a lane's are gates[16 q + t].
__device__ __forceinline__ void load_gates(float* gates, const Head& head, int block) {
  if (thread() >= kKeys) return;
  const int key = min(block + thread(), head.p.tokens - 1);
  gates[thread()] = head.p.gate[key * head.p.gate_stride + head.index];
}

// What the remainder of row `row` multiplies: v_j, r_h or nothing.
__device__ __forceinline__ const __nv_bfloat16* remainder_row(const Head& head, int row) {
  if (head.p.remainder == StickRemainder::kValue) return head.row(head.p.v, row);
  return head.p.remainder_bias + head.index * head.p.head_dim;
}

// ---- Forward ------------------------------------------------------------------------------------

template <int kD>
constexpr int forward_shared_bytes() {
  return 2 * kD * (Shape<kD, Pass::kForward>::kQueries + 4 * kKeys) + 2 * kKeys * 4;
}

// o_j += rem_j * (v_j or r_h).
template <int kRowBlocks, int kD>
__device__ __forceinline__ void add_remainder(Accumulator<kRowBlocks, kD / 8>& o, const Head& head,
                                              int first, const float* left) {
  o.for_each([&](float& x, auto at) {
    const int row = first + at.row;
    if (row >= head.p.tokens || at.col >= head.p.head_dim) return;
    x += left[at.lane_row] * __bfloat162float(remainder_row(head, row)[at.col]);
  });
}

template <int kD, bool kGated>
__global__ void __launch_bounds__(kThreads, Shape<kD, Pass::kForward>::kBlocks)
    forward_kernel(const StickBreakingProblem p) {
  constexpr int kRowBlocks = Shape<kD, Pass::kForward>::kRowBlocks;
  constexpr int kQueries = Shape<kD, Pass::kForward>::kQueries;
  extern __shared__ __align__(128) unsigned char shared[];
  auto* q_tile = reinterpret_cast<__nv_bfloat16*>(shared);
  __nv_bfloat16* k_tiles = q_tile + kQueries * kD;
  __nv_bfloat16* v_tiles = k_tiles + 2 * kKeys * kD;
  auto* gates = reinterpret_cast<float*>(v_tiles + 2 * kKeys * kD);

  const Head head(p, static_cast<int>(blockIdx.y));
  // Later tiles have more keys, as a rule: they start first.
  const int tile = static_cast<int>(gridDim.x - 1 - blockIdx.x) * kQueries;
  const int first = tile + thread() / 32 * Shape<kD, Pass::kForward>::kWarpRows;
  const SeenKeys<kRowBlocks, false> seen(head, first);
  const int lowest = SeenKeys<kRowBlocks, false>::begin(head, tile) / kKeys * kKeys;
  const int end = min(tile + kQueries, p.tokens);
  const float scale_log2 = p.scale * kLog2e;

  const auto load_block = [&](int block, int stage) {
    load_keys<kD>(k_tiles + stage * kKeys * kD, head, p.k, block);
    load_keys<kD>(v_tiles + stage * kKeys * kD, head, p.v, block);
    if constexpr (kGated) load_gates(gates + stage * kKeys, head, block);
    cp_async_commit();
  };
  load_rows<kQueries, kD>(q_tile, head, p.q, tile);
  int block = (end - 1) / kKeys * kKeys;
  load_block(block, 0);
  TileRows<kRowBlocks, kD, (kD <= 64)> queries(
      q_tile, thread() / 32 * Shape<kD, Pass::kForward>::kWarpRows);
  Sticks<kRowBlocks, kGated> sticks;
  Accumulator<kRowBlocks, kD / 8> o;
  o.clear();
  for (int stage = 0;; stage ^= 1, block -= kKeys) {
    cp_async_wait<0>();
    __syncthreads();
    if (block == (end - 1) / kKeys * kKeys) queries.load();
    if (block > lowest) load_block(block - kKeys, stage ^ 1);
    if (seen.some(block)) {
      Accumulator<kRowBlocks, 8> s;
      product_with_rows<kRowBlocks, 8, kD>(s, queries, k_tiles + stage * kKeys * kD);
      const int lane_key = block + kLaneKeys * quad_lane();
      const float* lane_gates = gates + stage * kKeys + kLaneKeys * quad_lane();
      if (seen.all(block)) {
        sticks.template break_block<false>(s, lane_key, scale_log2, seen.rows, lane_gates);
      } else {
        sticks.template break_block<true>(s, lane_key, scale_log2, seen.rows, lane_gates);
      }
      add_product<kRowBlocks, 8, kD>(o, s, v_tiles + stage * kKeys * kD);
    }
    if (block <= lowest) break;
    if (p.skip_epsilon > 0) {
      bool done = true;
#pragma unroll
      for (int i = 0; i < 2 * kRowBlocks; ++i) {
        done = done && (sticks.left[i] < p.skip_epsilon || seen.rows.begin[i] >= block);
      }
      if (__syncthreads_and(done)) break;
    }
  }
  cp_async_wait<0>();

  if (p.remainder != StickRemainder::kNone) {
    add_remainder<kRowBlocks, kD>(o, head, first, sticks.left);
  }
  store_rows(head.row(p.o, first), p.o.stride, p.tokens - first, p.head_dim, o,
             [](int) { return 1.0f; });
#pragma unroll
  for (int i = 0; i < 2 * kRowBlocks; ++i) {
    const float log2_left = quad_sum(sticks.log2_left[i]);
    const int row = first + lane_row(i);
    if (row >= p.tokens || quad_lane() != 0) continue;
    p.log2_rem[head.at(row)] = log2_left;
    p.stop[head.at(row)] = max(0, block - seen.rows.begin[i]);
  }
}

// ---- Backward -----------------------------------------------------------------------------------

// Where {log2 T, C} of the row at the left edge of `block` is kept; null before its document.
__device__ __forceinline__ float2* saved_state(const Head& head, int row, int block) {
  const StickBreakingProblem& p = head.p;
  const int n = (block - (row - p.positions[row]) / kKeys * kKeys) / kKeys;
  if (block < (row - p.positions[row]) / kKeys * kKeys) return nullptr;
  const int64_t slot = head.index % p.workspace_heads * p.workspace_blocks + n;
  return reinterpret_cast<float2*>(p.workspace) + slot * p.tokens + row;
}

// do_j . (v_j or r_h): what the remainder's gradient is. The lanes of a quad share the columns.
__device__ __forceinline__ float remainder_gradient(const Head& head, int row) {
  if (head.p.remainder == StickRemainder::kNone) return 0.0f;
  float sum = 0.0f;
  if (row < head.p.tokens) {
    const __nv_bfloat16* r = remainder_row(head, row);
    const __nv_bfloat16* dout = head.row(head.p.dout, row);
    for (int col = quad_lane() * 8; col < head.p.head_dim; col += 32) {
      const uint4 x = *reinterpret_cast<const uint4*>(dout + col);
      const uint4 y = *reinterpret_cast<const uint4*>(r + col);
      const auto* xs = reinterpret_cast<const __nv_bfloat162*>(&x);
      const auto* ys = reinterpret_cast<const __nv_bfloat162*>(&y);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float2 a = __bfloat1622float2(xs[n]);
        const float2 b = __bfloat1622float2(ys[n]);
        sum += a.x * b.x + a.y * b.y;
      }
    }
  }
  return quad_sum(sum);
}

template <int kD>
constexpr int query_shared_bytes() {
  return 2 * kD * (2 * Shape<kD, Pass::kQuery>::kQueries + 4 * kKeys) + 2 * kKeys * 4;
}

// Phase 1: dq, and the states from which phase 2 starts.
template <int kD, bool kGated>
__global__ void __launch_bounds__(kThreads, Shape<kD, Pass::kQuery>::kBlocks)
    query_gradient_kernel(const StickBreakingProblem p, int first_head) {
  constexpr int kRowBlocks = Shape<kD, Pass::kQuery>::kRowBlocks;
  constexpr int kQueries = Shape<kD, Pass::kQuery>::kQueries;
  extern __shared__ __align__(128) unsigned char shared[];
  auto* q_tile = reinterpret_cast<__nv_bfloat16*>(shared);
  __nv_bfloat16* dout_tile = q_tile + kQueries * kD;
  __nv_bfloat16* k_tiles = dout_tile + kQueries * kD;
  __nv_bfloat16* v_tiles = k_tiles + 2 * kKeys * kD;
  auto* gates = reinterpret_cast<float*>(v_tiles + 2 * kKeys * kD);

  const Head head(p, first_head + static_cast<int>(blockIdx.y));
  const int tile = static_cast<int>(gridDim.x - 1 - blockIdx.x) * kQueries;
  const int warp_row = thread() / 32 * Shape<kD, Pass::kQuery>::kWarpRows;
  const int first = tile + warp_row;
  using Seen = SeenKeys<kRowBlocks, true>;
  const Seen seen(head, first);
  const int end = min(tile + kQueries, p.tokens);
  int lowest = INT_MAX;
  for (int row = tile; row < end; row += Shape<kD, Pass::kQuery>::kWarpRows) {
    lowest = min(lowest, Seen::begin(head, row));
  }
  const float scale_log2 = p.scale * kLog2e;

  StickGradients<kRowBlocks, kGated> sticks;
#pragma unroll
  for (int i = 0; i < 2 * kRowBlocks; ++i) {
    const int row = first + lane_row(i);
    sticks.log2_left[i] = row < p.tokens ? p.log2_rem[head.at(row)] : 0.0f;
    sticks.c[i] = 0.0f;
    sticks.drem[i] = remainder_gradient(head, row);
  }
  const auto load_block = [&](int block, int stage) {
    load_keys<kD>(k_tiles + stage * kKeys * kD, head, p.k, block);
    load_keys<kD>(v_tiles + stage * kKeys * kD, head, p.v, block);
    if constexpr (kGated) load_gates(gates + stage * kKeys, head, block);
    cp_async_commit();
  };
  load_rows<kQueries, kD>(q_tile, head, p.q, tile);
  load_rows<kQueries, kD>(dout_tile, head, p.dout, tile);
  int block = lowest / kKeys * kKeys;
  load_block(block, 0);
  const TileRows<kRowBlocks, kD, false> queries(q_tile, warp_row);
  const TileRows<kRowBlocks, kD, false> douts(dout_tile, warp_row);
  Accumulator<kRowBlocks, kD / 8> dq;
  dq.clear();
  for (int stage = 0; block < end; stage ^= 1, block += kKeys) {
    cp_async_wait<0>();
    __syncthreads();
    if (block + kKeys < end) load_block(block + kKeys, stage ^ 1);
    if (!seen.some(block)) continue;
#pragma unroll
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      const int row = first + lane_row(i);
      if (quad_lane() != 0 || row >= p.tokens) continue;
      float2* state = saved_state(head, row, block);
      if (state) *state = make_float2(sticks.log2_left[i], sticks.c[i]);
    }
    Accumulator<kRowBlocks, 8> s, dp;
    product_with_rows<kRowBlocks, 8, kD>(s, queries, k_tiles + stage * kKeys * kD);
    product_with_rows<kRowBlocks, 8, kD>(dp, douts, v_tiles + stage * kKeys * kD);
    const int lane_key = block + kLaneKeys * quad_lane();
    const float* lane_gates = gates + stage * kKeys + kLaneKeys * quad_lane();
    if (seen.all(block)) {
      sticks.template break_block<false>(s, dp, lane_key, scale_log2, seen.rows, lane_gates,
                                         nullptr);
    } else {
      sticks.template break_block<true>(s, dp, lane_key, scale_log2, seen.rows, lane_gates,
                                        nullptr);
    }
    add_product<kRowBlocks, 8, kD>(dq, dp, k_tiles + stage * kKeys * kD);
  }
  cp_async_wait<0>();
  const float scale = p.scale;
  store_rows(head.row(p.dq, first), p.dq.stride, p.tokens - first, p.head_dim, dq,
             [scale](int) { return scale; });
}

// The warps share the products with the transposed tiles [queries, keys]: two halves of the keys,
// two of the columns.
template <int kD>
using KeyGradient = Accumulator<2, kD / 16>;

// sum += tile^T x, tile [kQueries, 64] and x [kQueries, kD].
template <int kD>
__device__ __forceinline__ void add_transposed_product(KeyGradient<kD>& sum,
                                                       const __nv_bfloat16* tile,
                                                       const __nv_bfloat16* x) {
  const int warp = thread() / 32;
  const int key = warp / 2 * 32;
  const int col = warp % 2 * (kD / 2);
#pragma unroll
  for (int query = 0; query < Shape<kD, Pass::kKey>::kQueries; query += 16) {
    uint32_t a[2][4];
    load_a_trans<kKeys>(a[0], tile, query, key);
    load_a_trans<kKeys>(a[1], tile, query, key + 16);
#pragma unroll
    for (int c = 0; c < kD / 16; c += 2) {
      uint32_t b[4];
      load_b<kD>(b, x, query, col + c * 8);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        mma_m16n8k16_bf16(sum.at[r][c], a[r], b[0], b[1]);
        if (kD > 16) mma_m16n8k16_bf16(sum.at[r][c + 1], a[r], b[2], b[3]);
      }
    }
  }
}

// The warp's rows of a tile [kQueries, 64] = x, rounded.
template <int kRowBlocks>
__device__ __forceinline__ void store_scores(__nv_bfloat16* tile, int warp_row,
                                             const Accumulator<kRowBlocks, 8>& x) {
#pragma unroll
  for (int i = 0; i < 2 * kRowBlocks; ++i) {
    const int row = warp_row + lane_row(i);
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const float* pair = x.at[i / 2][c] + i % 2 * 2;
      *reinterpret_cast<uint32_t*>(tile + tile_offset<kKeys>(row, c) + 2 * quad_lane()) =
          pack_bf16(pair[0], pair[1]);
    }
  }
}

template <int kD, typename Add>
__device__ __forceinline__ void store_key_gradient(const Head& head, const HeadRows& out, int block,
                                                   KeyGradient<kD>& x, float factor, Add&& add) {
  const int warp = thread() / 32;
  x.for_each([&](float& value, auto at) {
    const int key = block + key_of_row(warp / 2 * 32 + at.row);
    const int col = warp % 2 * (kD / 2) + at.col;
    if (key >= head.p.tokens || col >= head.p.head_dim) return;
    head.row(out, key)[col] = __float2bfloat16(value * factor + add(key, col));
  });
}

template <int kD>
constexpr int key_shared_bytes(int stages, bool gated) {
  return 2 * (2 * kKeys * kD + 2 * stages * Shape<kD, Pass::kKey>::kQueries * kD +
              2 * Shape<kD, Pass::kKey>::kQueries * kKeys) +
         (gated ? kKeys * 4 * (1 + kWarps) : 0);
}

// Phase 2: dk, dv and the gate's gradient.
template <int kD, bool kGated, int kStages>
__global__ void __launch_bounds__(kThreads, Shape<kD, Pass::kKey>::kBlocks)
    key_gradient_kernel(const StickBreakingProblem p, int first_head) {
  constexpr int kRowBlocks = Shape<kD, Pass::kKey>::kRowBlocks;
  constexpr int kQueries = Shape<kD, Pass::kKey>::kQueries;
  extern __shared__ __align__(128) unsigned char shared[];
  auto* k_tile = reinterpret_cast<__nv_bfloat16*>(shared);
  __nv_bfloat16* v_tile = k_tile + kKeys * kD;
  __nv_bfloat16* q_tiles = v_tile + kKeys * kD;
  __nv_bfloat16* dout_tiles = q_tiles + kStages * kQueries * kD;
  __nv_bfloat16* a_tile = dout_tiles + kStages * kQueries * kD;
  __nv_bfloat16* dz_tile = a_tile + kQueries * kKeys;
  auto* gates = reinterpret_cast<float*>(dz_tile + kQueries * kKeys);
  float* gate_sums = gates + kKeys;  // [kWarps, kKeys]

  const Head head(p, first_head + static_cast<int>(blockIdx.y));
  const int block = static_cast<int>(blockIdx.x) * kKeys;
  const int warp_row = thread() / 32 * Shape<kD, Pass::kKey>::kWarpRows;
  const int end = document_end(p, min(block + kKeys, p.tokens) - 1);
  const float scale_log2 = p.scale * kLog2e;
  using Seen = SeenKeys<kRowBlocks, true>;

  // The first tile from `tile` on with a row that sees some key of the block.
  const auto next_tile = [&](int tile) {
    for (; tile < end; tile += kQueries) {
      for (int row = tile; row < min(tile + kQueries, end);
           row += Shape<kD, Pass::kKey>::kWarpRows) {
        if (Seen::begin(head, row) < block + kKeys) return tile;
      }
    }
    return tile;
  };
  const auto load_tiles = [&](int tile, int stage) {
    load_rows<kQueries, kD>(q_tiles + stage * kQueries * kD, head, p.q, tile);
    load_rows<kQueries, kD>(dout_tiles + stage * kQueries * kD, head, p.dout, tile);
    cp_async_commit();
  };

  load_keys<kD>(k_tile, head, p.k, block);
  load_keys<kD>(v_tile, head, p.v, block);
  if constexpr (kGated) load_gates(gates, head, block);
  int tile = next_tile(block / kQueries * kQueries);
  if (tile < end) load_tiles(tile, 0);
  KeyGradient<kD> dk, dv;
  dk.clear();
  dv.clear();
  float dgate[kLaneKeys] = {};
  for (int stage = 0; tile < end; stage = (stage + 1) % kStages) {
    const int next = next_tile(tile + kQueries);
    cp_async_wait<0>();
    __syncthreads();
    if (kStages > 1 && next < end) load_tiles(next, (stage + 1) % kStages);
    const __nv_bfloat16* q_tile = q_tiles + stage * kQueries * kD;
    const __nv_bfloat16* dout_tile = dout_tiles + stage * kQueries * kD;
    const int first = tile + warp_row;
    const Seen seen(head, first);
    Accumulator<kRowBlocks, 8> s, dp;
    if (seen.some(block)) {
      StickGradients<kRowBlocks, kGated> sticks;
#pragma unroll
      for (int i = 0; i < 2 * kRowBlocks; ++i) {
        const int row = first + lane_row(i);
        const float2* state = row < p.tokens ? saved_state(head, row, block) : nullptr;
        const bool begun = state && seen.rows.begin[i] < block + kKeys;
        const float2 at_left = begun ? *state : make_float2(0.0f, 0.0f);
        sticks.log2_left[i] = at_left.x;
        sticks.c[i] = at_left.y;
        sticks.drem[i] = remainder_gradient(head, row);
      }
      const TileRows<kRowBlocks, kD, false> queries(q_tile, warp_row);
      const TileRows<kRowBlocks, kD, false> douts(dout_tile, warp_row);
      product_with_rows<kRowBlocks, 8, kD>(s, queries, k_tile);
      product_with_rows<kRowBlocks, 8, kD>(dp, douts, v_tile);
      const int lane_key = block + kLaneKeys * quad_lane();
      const float* lane_gates = gates + kLaneKeys * quad_lane();
      if (seen.all(block)) {
        sticks.template break_block<false>(s, dp, lane_key, scale_log2, seen.rows, lane_gates,
                                           dgate);
      } else {
        sticks.template break_block<true>(s, dp, lane_key, scale_log2, seen.rows, lane_gates,
                                          dgate);
      }
    } else {
      s.clear();
      dp.clear();
    }
    store_scores(a_tile, warp_row, s);
    store_scores(dz_tile, warp_row, dp);
    __syncthreads();
    add_transposed_product<kD>(dv, a_tile, dout_tile);
    add_transposed_product<kD>(dk, dz_tile, q_tile);
    tile = next;
    if (kStages == 1 && next < end) {
      __syncthreads();
      load_tiles(next, 0);
    }
  }
  cp_async_wait<0>();

  store_key_gradient<kD>(head, p.dk, block, dk, p.scale, [](int, int) { return 0.0f; });
  const bool to_value = p.remainder == StickRemainder::kValue;
  store_key_gradient<kD>(head, p.dv, block, dv, 1.0f, [&](int key, int col) {
    if (!to_value) return 0.0f;
    return exp2_ftz(p.log2_rem[head.at(key)]) * __bfloat162float(head.row(p.dout, key)[col]);
  });
  if constexpr (kGated) {
#pragma unroll
    for (int t = 0; t < kLaneKeys; ++t) {
      float sum = dgate[t];  // over the warp's rows: lanes of equal quad_lane()
      for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (thread() % 32 < 4) {
        gate_sums[thread() / 32 * kKeys + kLaneKeys * quad_lane() + t] = sum;
      }
    }
    __syncthreads();
    const int key = block + thread();
    if (thread() < kKeys && key < p.tokens) {
      float sum = 0.0f;
      for (int warp = 0; warp < kWarps; ++warp) sum += gate_sums[warp * kKeys + thread()];
      p.dgate[key * p.dgate_stride + head.index] = __float2bfloat16(sum);
    }
  }
}

// dr_h += sum_j rem_j do_j: a block for each head, threads [rows, columns].
constexpr int kBiasThreads = 512;
__global__ void remainder_bias_kernel(const StickBreakingProblem p) {
  __shared__ float sums[kBiasThreads];
  const Head head(p, static_cast<int>(blockIdx.x));
  const int rows = kBiasThreads / p.head_dim;
  const int col = thread() % p.head_dim;
  const int begin = thread() / p.head_dim;
  float sum = 0.0f;
  if (begin < rows) {
    for (int row = begin; row < p.tokens; row += rows) {
      sum += exp2_ftz(p.log2_rem[head.at(row)]) * __bfloat162float(head.row(p.dout, row)[col]);
    }
  }
  sums[thread()] = sum;
  __syncthreads();
  if (thread() >= p.head_dim) return;
  float total = 0.0f;
  for (int i = 0; i < rows; ++i) total += sums[i * p.head_dim + col];
  p.dremainder_bias[head.index * p.head_dim + col] += total;
}

// ---- Launch -------------------------------------------------------------------------------------

template <typename Kernel, typename... Args>
cudaError_t launch(Kernel kernel, dim3 grid, int shared_bytes, cudaStream_t stream,
                   const Args&... args) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  kernel<<<grid, kThreads, static_cast<size_t>(shared_bytes), stream>>>(args...);
  return cudaGetLastError();
}

unsigned tiles_of(int tokens, int rows) {
  return static_cast<unsigned>((tokens + rows - 1) / rows);
}

template <int kD, bool kGated>
cudaError_t forward(cudaStream_t stream, const StickBreakingProblem& p) {
  const dim3 grid(tiles_of(p.tokens, Shape<kD, Pass::kForward>::kQueries),
                  static_cast<unsigned>(p.heads));
  return launch(forward_kernel<kD, kGated>, grid, forward_shared_bytes<kD>(), stream, p);
}

template <int kD, bool kGated>
cudaError_t backward(cudaStream_t stream, const StickBreakingProblem& p) {
  int device = 0;
  int shared_limit = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&shared_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  const int stages = key_shared_bytes<kD>(2, kGated) <= shared_limit ? 2 : 1;
  for (int head = 0; head < p.heads; head += p.workspace_heads) {
    const auto heads = static_cast<unsigned>(
        p.heads - head < p.workspace_heads ? p.heads - head : p.workspace_heads);
    error = launch(query_gradient_kernel<kD, kGated>,
                   dim3(tiles_of(p.tokens, Shape<kD, Pass::kQuery>::kQueries), heads),
                   query_shared_bytes<kD>(), stream, p, head);
    if (error != cudaSuccess) return error;
    const dim3 grid(tiles_of(p.tokens, kKeys), heads);
    error = stages == 2 ? launch(key_gradient_kernel<kD, kGated, 2>, grid,
                                 key_shared_bytes<kD>(2, kGated), stream, p, head)
                        : launch(key_gradient_kernel<kD, kGated, 1>, grid,
                                 key_shared_bytes<kD>(1, kGated), stream, p, head);
    if (error != cudaSuccess) return error;
  }
  if (p.remainder != StickRemainder::kBias) return cudaSuccess;
  remainder_bias_kernel<<<static_cast<unsigned>(p.heads), kBiasThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

template <template <int, bool> typename Run>
cudaError_t dispatch(cudaStream_t stream, const StickBreakingProblem& p) {
  if (p.tokens == 0) return cudaSuccess;
  if (p.head_dim <= 0 || p.head_dim > 128 || p.head_dim % 8 != 0) return cudaErrorInvalidValue;
  const auto run = [&](auto gated) {
    constexpr bool kGated = decltype(gated)::value;
    if (p.head_dim <= 32) return Run<32, kGated>::run(stream, p);
    if (p.head_dim <= 64) return Run<64, kGated>::run(stream, p);
    return Run<128, kGated>::run(stream, p);
  };
  return p.gate ? run(std::true_type()) : run(std::false_type());
}

template <int kD, bool kGated>
struct Forward {
  static cudaError_t run(cudaStream_t stream, const StickBreakingProblem& p) {
    return forward<kD, kGated>(stream, p);
  }
};
template <int kD, bool kGated>
struct Backward {
  static cudaError_t run(cudaStream_t stream, const StickBreakingProblem& p) {
    return backward<kD, kGated>(stream, p);
  }
};

}  // namespace

cudaError_t stickbreaking_forward(cudaStream_t stream, const StickBreakingProblem& problem) {
  return dispatch<Forward>(stream, problem);
}

cudaError_t stickbreaking_backward(cudaStream_t stream, const StickBreakingProblem& problem) {
  return dispatch<Backward>(stream, problem);
}

}  // namespace sbtrain::kernels
