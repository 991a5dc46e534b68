// Stick-breaking attention backward, in two phases. Both compute A and dz, block by block from
// left to right. In the first a tile of queries walks over its blocks of keys: it finds dq, and
// leaves {log2 T, C} of each row at each block. From these the second starts in any block: a block
// of keys walks over the queries that see it and finds dk and dv. Nothing is added by atomics.
#pragma once

#include "kernels/attention/epilogue.cuh"
#include "kernels/attention/score_stickbreaking_backward.cuh"
#include "kernels/attention/stickbreaking_tiles.cuh"
#include "kernels/primitives/block_index.cuh"

namespace sbtrain::kernels {

// Where {log2 T, C} of the row at the left edge of `block` is kept; null before its document.
template <bool kFar = false>
__device__ __forceinline__ float2* saved_state(const StickBreakingProblem& p, const StickHead& head,
                                               int row, int block) {
  if constexpr (kFar) {
    const int n = (block - p.far.key / kStickKeys * kStickKeys) / kStickKeys;
    const int64_t slot = head.index % p.workspace_heads * p.workspace_blocks + n;
    return reinterpret_cast<float2*>(p.workspace) + slot * p.workspace_tokens + row -
           p.far.first_query;
  }
  const int n = (block - (row - p.positions[row]) / kStickKeys * kStickKeys) / kStickKeys;
  if (block < (row - p.positions[row]) / kStickKeys * kStickKeys) return nullptr;
  const int64_t slot = head.index % p.workspace_heads * p.workspace_blocks + n;
  return reinterpret_cast<float2*>(p.workspace) + slot * p.tokens + row;
}

// What flows to the remainder's gradient through o, do_j . (v_j or r_h). The lanes of a quad share
// the columns. That is not made a part of drem by a kernel of its own: the rows are at hand here,
// and dv takes its part of them in phase 2 in any case.
__device__ __forceinline__ float remainder_gradient(const StickBreakingProblem& p,
                                                    const StickHead& head, int row) {
  if (p.remainder == StickRemainder::kNone) return 0.0f;
  float sum = 0.0f;
  if (row < p.tokens) {
    const __nv_bfloat16* r = remainder_row(p, head, row);
    const __nv_bfloat16* dout = head.row(p.dout, row);
    for (int col = quad_lane() * 8; col < p.head_dim; col += 32) {
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
// The same and what the loss gives the remainder otherwise.
__device__ __forceinline__ float whole_remainder_gradient(const StickBreakingProblem& p,
                                                          const StickHead& head, int row) {
  const float gradient = remainder_gradient(p, head, row);
  return p.drem && row < p.tokens ? gradient + p.drem[head.at(row)] : gradient;
}

// ---- Phase 1: dq, and the states from which phase 2 starts --------------------------------------

template <int kD>
constexpr int stick_query_shared_bytes() {
  return 2 * kD * 2 * StickShape<kD, StickPass::kQuery>::kQueries + KeyStages<kD, true>::kBytes;
}

// Sets the states of the lane's rows to those at the left of their first keys.
template <int kRowBlocks, bool kFar = false, bool kGated>
__device__ __forceinline__ void enter_rows(
    StickGradients<2 * kRowBlocks, kStickKeys, kGated>& sticks, const StickBreakingProblem& p,
    const StickHead& head, int first) {
#pragma unroll
  for (int i = 0; i < 2 * kRowBlocks; ++i) {
    const int row = first + lane_row() + 8 * i;
    const bool any = row < end_row<kFar>(p);
    const float log2_rem = any ? p.log2_rem[head.at(row)] : 0.0f;
    if constexpr (kFar) {
      // C begins with what the keys leave times W, and hands W on, with gates too.
      sticks.log2_left[i] = log2_rem;
      sticks.c[i] = any ? p.far.w[head.at(row)] * exp2_ftz(log2_rem) : 0.0f;
      sticks.drem[i] = 0.0f;
    } else {
      sticks.begin(i, log2_rem, whole_remainder_gradient(p, head, row));
    }
  }
}

// C at the right of all keys, the gradient of the stick that they find times that stick, becomes W.
// Where next to nothing has come, no nearer key asks what it was worth.
__device__ __forceinline__ float gradient_of_found(float c, float log2_before) {
  constexpr float kLeast = -100.0f;
  return log2_before < kLeast ? 0.0f : c * exp2_ftz(-log2_before);
}
template <int kRows, bool kGated>
__device__ __forceinline__ void leave_rows(const StickGradients<kRows, kStickKeys, kGated>& sticks,
                                           const StickBreakingProblem& p, const StickHead& head,
                                           int first) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = first + lane_row() + 8 * i;
    if (quad_lane() != 0 || row >= p.far.queries) continue;
    p.far.w[head.at(row)] = gradient_of_found(sticks.c[i], p.far.before[head.at(row)]);
  }
}

template <int kRowBlocks, bool kFar = false, bool kGated>
__device__ __forceinline__ void save_states(
    const StickGradients<2 * kRowBlocks, kStickKeys, kGated>& sticks, const StickBreakingProblem& p,
    const StickHead& head, int first, int block) {
#pragma unroll
  for (int i = 0; i < 2 * kRowBlocks; ++i) {
    const int row = first + lane_row() + 8 * i;
    if (quad_lane() != 0 || row >= end_row<kFar>(p)) continue;
    float2* state = saved_state<kFar>(p, head, row, block);
    if (state) *state = make_float2(sticks.log2_left[i], sticks.c[i]);
  }
}

template <int kD, bool kGated, bool kFar = false>
static __global__ void __launch_bounds__(StickThreads::kThreads,
                                         StickShape<kD, StickPass::kQuery>::kBlocks)
    stick_query_gradient_kernel(const StickBreakingProblem p, int first_head, int first_key_head) {
  using Shape = StickShape<kD, StickPass::kQuery>;
  constexpr int kRowBlocks = Shape::kRowBlocks;
  constexpr int kQueries = Shape::kQueries;
  extern __shared__ __align__(128) unsigned char memory[];
  auto* q_tile = reinterpret_cast<__nv_bfloat16*>(memory);
  __nv_bfloat16* dout_tile = q_tile + kQueries * kD;
  using Keys = KeyStages<kD, kGated>;
  const Keys keys(dout_tile + kQueries * kD);

  const StickThreads group;
  const StickHead head = head_of_block(p, first_head, first_key_head);
  const int tile =
      (kFar ? p.far.first_query : 0) + static_cast<int>(gridDim.x - 1 - blockIdx.x) * kQueries;
  const int warp_row = group.warp() * Shape::kWarpRows;
  const int first = tile + warp_row;
  const Visibility visibility = visibility_of<true, kFar>(p, head);
  const RowKeys<kRowBlocks> seen(visibility, first);
  const int end = end_key_of_rows<kFar>(p, tile + kQueries);
  int lowest = INT_MAX;
  for (int row = tile; row < min(tile + kQueries, p.tokens); row += Shape::kWarpRows) {
    lowest = min(lowest, visibility.first_key(row));
  }
  const float scale_log2 = p.scale * kLog2e;

  StickGradients<2 * kRowBlocks, kStickKeys, kGated> sticks;
  enter_rows<kRowBlocks, kFar>(sticks, p, head, first);
  load_rows<kQueries, kD>(group, q_tile, head, p.q, tile);
  load_rows<kQueries, kD>(group, dout_tile, head, p.dout, tile);
  const int begin = lowest / kStickKeys * kStickKeys;
  int block = begin;
  keys.load(group, p, head, block, 0);
  const TileRows<kRowBlocks, kD, false> queries(q_tile, warp_row);
  const TileRows<kRowBlocks, kD, false> douts(dout_tile, warp_row);
  Accumulator<kRowBlocks, kD / 8> dq;
  dq.clear();
  for (int stage = 0; block < end; stage ^= Keys::kStages - 1, block += kStickKeys) {
    if (Keys::kStages == 1 && block > begin) {
      group.sync();  // the block before has been read
      keys.load(group, p, head, block, stage);
    }
    cp_async_wait<0>();
    group.sync();
    if (Keys::kStages > 1 && block + kStickKeys < end)
      keys.load(group, p, head, block + kStickKeys, stage ^ 1);
    if (!seen.some(block, kStickKeys)) continue;
    save_states<kRowBlocks, kFar>(sticks, p, head, first, block);
    Accumulator<kRowBlocks, kStickKeys / 8> s, dp;
    product_with_rows(s, queries, keys.k(stage));
    product_with_rows(dp, douts, keys.v(stage));
    sticks.score(s, dp, block, scale_log2, seen, keys.gates(stage), nullptr);
    add_product<kRowBlocks, kStickKeys / 8, kD>(dq, dp, keys.k(stage));
  }
  cp_async_wait<0>();
  const float scale = p.scale * p.query_factor;
  const auto scaled = [scale](int) { return scale; };
  if constexpr (kFar) {
    add_rows(sum_row(head, p.far.dq, first), p.far.dq.stride, p.far.queries - first, p.head_dim, dq,
             scaled);
    leave_rows(sticks, p, head, first);
  } else {
    store_rows(head.row(p.dq, first), p.dq.stride, p.tokens - first, p.head_dim, dq, scaled);
  }
}

// ---- Phase 2: dk, dv and the gate's gradient ----------------------------------------------------

// The gradients of the widest heads do not fit the registers of a block, so that two blocks compute
// them, each for half of the columns; the scores are computed by both.
template <int kD>
inline constexpr int kColumnParts = kD > 128 ? 2 : 1;
template <int kD>
inline constexpr int kPartColumns = kD / kColumnParts<kD>;

// The warps divide the products with the transposed tiles [queries, keys] among them: two halves of
// the keys times two halves of the columns.
template <int kD>
using KeyGradient = Accumulator<2, kPartColumns<kD> / 16>;

// The first column of a warp in part `part`.
template <int kD>
__device__ __forceinline__ int first_gradient_column(int warp, int part) {
  return part * kPartColumns<kD> + warp % 2 * (kPartColumns<kD> / 2);
}

// sum += tile^T x, tile [kQueries, 64] and x [kQueries, kD].
template <int kD>
__device__ __forceinline__ void add_transposed_product(KeyGradient<kD>& sum, int warp, int part,
                                                       const __nv_bfloat16* tile,
                                                       const __nv_bfloat16* x) {
  const int key = warp / 2 * 32;
  const int col = first_gradient_column<kD>(warp, part);
#pragma unroll
  for (int query = 0; query < StickShape<kD, StickPass::kKey>::kQueries; query += 16) {
    uint32_t a[2][4];
    load_a_trans<kStickKeys>(a[0], tile, query, key);
    load_a_trans<kStickKeys>(a[1], tile, query, key + 16);
#pragma unroll
    for (int c = 0; c < kPartColumns<kD> / 16; c += 2) {
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
                                             const Accumulator<kRowBlocks, kStickKeys / 8>& x) {
#pragma unroll
  for (int i = 0; i < 2 * kRowBlocks; ++i) {
    const int row = warp_row + lane_row() + 8 * i;
#pragma unroll
    for (int c = 0; c < kStickKeys / 8; ++c) {
      const float* pair = x.at[i / 2][c] + i % 2 * 2;
      *reinterpret_cast<uint32_t*>(tile + tile_offset<kStickKeys>(row, c) + 2 * quad_lane()) =
          pack_bf16(pair[0], pair[1]);
    }
  }
}

// Calls body(value, key, column) for the gradients of the keys from `block` on.
template <int kD, typename Body>
__device__ __forceinline__ void for_each_key_gradient(const StickHead& head, int block, int warp,
                                                      int part, KeyGradient<kD>& x, Body&& body) {
  x.for_each([&](float& value, auto at) {
    const int key = block + key_of_row<kStickKeys>(warp / 2 * 32 + at.row);
    const int col = first_gradient_column<kD>(warp, part) + at.col;
    if (key < head.p.tokens && col < head.p.head_dim) body(value, key, col);
  });
}
// out = factor x.
template <int kD>
__device__ __forceinline__ void store_key_gradient(const StickHead& head, const HeadRows& out,
                                                   int block, int warp, int part,
                                                   KeyGradient<kD>& x, float factor) {
  for_each_key_gradient<kD>(head, block, warp, part, x, [&](float value, int key, int col) {
    head.row(out, key)[col] = __float2bfloat16(value * factor);
  });
}

// out += factor x, f32.
template <int kD>
__device__ __forceinline__ void add_key_gradient(const StickHead& head, const Matrix<float>& out,
                                                 int block, int warp, int part, KeyGradient<kD>& x,
                                                 float factor) {
  for_each_key_gradient<kD>(head, block, warp, part, x, [&](float value, int key, int col) {
    sum_row(head, out, key)[col] += value * factor;
  });
}

// Sums of a block of keys, as the threads hold them, which one launch leaves to the next: `which`
// is 0 for dk and 1 for dv.
template <int kD>
class KeySums {
 public:
  __device__ __forceinline__ KeySums(const StickBreakingProblem& p, int block, int part)
      : first_(p.key_sums + (block / kStickKeys * kColumnParts<kD> + part) * kFloats + threadIdx.x),
        all_(int64_t{(p.tokens + kStickKeys - 1) / kStickKeys} * kColumnParts<kD> * kFloats) {}
  __device__ __forceinline__ void load(KeyGradient<kD>& x, int which) const {
    const float* from = first_ + which * all_;
    x.for_each([&](float& value, auto) { value = *from, from += StickThreads::kThreads; });
  }
  __device__ __forceinline__ void save(KeyGradient<kD>& x, int which) const {
    float* to = first_ + which * all_;
    x.for_each([&](float& value, auto) { *to = value, to += StickThreads::kThreads; });
  }

 private:
  static constexpr int64_t kFloats = kStickKeys * kPartColumns<kD>;  // of a block and part
  float* first_;
  int64_t all_;
};

// Adds the warps' parts of the gate's gradient, dgate of a lane's keys, and writes it, or with kFar
// adds it to those of other queries.
template <bool kFar, int kLaneKeys>
__device__ __forceinline__ void write_gate_gradient(const StickThreads& group,
                                                    const StickBreakingProblem& p,
                                                    const StickHead& head, int block,
                                                    const float (&dgate)[kLaneKeys], float* sums) {
#pragma unroll
  for (int t = 0; t < kLaneKeys; ++t) {
    float sum = dgate[t];  // over the warp's rows: lanes of equal quad_lane()
    for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane() < 4) sums[group.warp() * kStickKeys + kLaneKeys * quad_lane() + t] = sum;
  }
  group.sync();
  const int key = block + group.thread();
  if (group.thread() < kStickKeys && key < p.tokens) {
    float sum = 0.0f;
    for (int warp = 0; warp < kStickWarps; ++warp) sum += sums[warp * kStickKeys + group.thread()];
    if constexpr (kFar) {
      if (key >= p.far.key) p.far.dgate.data[key * p.far.dgate.stride + head.index] += sum;
    } else {
      p.dgate[key * p.dgate_stride + head.index] = __float2bfloat16(sum);
    }
  }
}

// The layout of shared memory.
template <int kD, bool kGated, int kStages>
struct KeyGradientTiles {
  static constexpr int kQueries = StickShape<kD, StickPass::kKey>::kQueries;
  static constexpr int kBytes =
      2 * (2 * kStickKeys * kD + 2 * kStages * kQueries * kD + 2 * kQueries * kStickKeys) +
      (kGated ? kStickKeys * 4 * (1 + kStickWarps) : 0);
  __device__ __forceinline__ explicit KeyGradientTiles(unsigned char* shared)
      : k(reinterpret_cast<__nv_bfloat16*>(shared)),
        v(k + kStickKeys * kD),
        q_stages(v + kStickKeys * kD),
        dout_stages(q_stages + kStages * kQueries * kD),
        a(dout_stages + kStages * kQueries * kD),
        dz(a + kQueries * kStickKeys),
        gates(reinterpret_cast<float*>(dz + kQueries * kStickKeys)),
        gate_sums(gates + kStickKeys) {}
  __device__ __forceinline__ __nv_bfloat16* q(int stage) const {
    return q_stages + stage * kQueries * kD;
  }
  __device__ __forceinline__ __nv_bfloat16* dout(int stage) const {
    return dout_stages + stage * kQueries * kD;
  }
  __device__ __forceinline__ void load_queries(const StickThreads& group,
                                               const StickBreakingProblem& p, const StickHead& head,
                                               int tile, int stage) const {
    load_rows<kQueries, kD>(group, q(stage), head, p.q, tile);
    load_rows<kQueries, kD>(group, dout(stage), head, p.dout, tile);
    cp_async_commit();
  }
  __nv_bfloat16 *k, *v;                   // of the block's keys
  __nv_bfloat16 *q_stages, *dout_stages;  // of tiles of queries
  __nv_bfloat16 *a, *dz;                  // of a tile and the block
  float *gates, *gate_sums;               // [keys], [warps, keys]
};

// The first tile of queries from `tile` on with a row that sees some key before `end_key`.
template <typename Shape>
__device__ __forceinline__ int next_tile(const Visibility& visibility, int tile, int end,
                                         int end_key) {
  for (; tile < end; tile += Shape::kQueries) {
    for (int row = tile; row < min(tile + Shape::kQueries, end); row += Shape::kWarpRows) {
      if (visibility.first_key(row) < end_key) return tile;
    }
  }
  return tile;
}

// Sets the states of the lane's rows to those at the left edge of `block`.
template <bool kFar, int kRowBlocks, bool kGated>
__device__ __forceinline__ void enter_block(
    StickGradients<2 * kRowBlocks, kStickKeys, kGated>& sticks, const StickBreakingProblem& p,
    const StickHead& head, const RowKeys<kRowBlocks>& seen, int first, int block) {
#pragma unroll
  for (int i = 0; i < 2 * kRowBlocks; ++i) {
    const int row = first + lane_row() + 8 * i;
    const float2* state = row < p.tokens ? saved_state<kFar>(p, head, row, block) : nullptr;
    const bool begun = state && seen.begin[i] < block + kStickKeys;
    const float2 at_left = begun ? *state : make_float2(0.0f, 0.0f);
    sticks.log2_left[i] = at_left.x;
    sticks.c[i] = at_left.y;
    sticks.drem[i] = remainder_gradient(p, head, row);
    if (kGated && p.drem && row < p.tokens) sticks.drem[i] += p.drem[head.at(row)];
  }
}

// Adds what the queries of one head give to dk and dv of a block of keys, and writes the gradient
// of its gates.
template <int kD, bool kGated, int kStages, bool kFar>
__device__ __forceinline__ void add_queries_of_head(
    KeyGradient<kD>& dk, KeyGradient<kD>& dv, const KeyGradientTiles<kD, kGated, kStages>& tiles,
    const StickHead& head, int block, int part) {
  using Shape = StickShape<kD, StickPass::kKey>;
  constexpr int kRowBlocks = Shape::kRowBlocks;
  const StickBreakingProblem& p = head.p;
  const StickThreads group;
  const int warp = group.thread() / 32;
  const int warp_row = warp * Shape::kWarpRows;
  const Visibility visibility = visibility_of<true, kFar>(p, head);
  const int end = visibility.end_query(min(block + kStickKeys, p.tokens) - 1);
  const float scale_log2 = p.scale * kLog2e;

  if constexpr (kGated) load_gates(group, tiles.gates, p, head, block);
  const int begin = kFar ? p.far.first_query : block / Shape::kQueries * Shape::kQueries;
  int tile = next_tile<Shape>(visibility, begin, end, block + kStickKeys);
  if (tile < end) tiles.load_queries(group, p, head, tile, 0);
  float dgate[kStickKeys / 4] = {};
  for (int stage = 0; tile < end; stage = (stage + 1) % kStages) {
    const int next = next_tile<Shape>(visibility, tile + Shape::kQueries, end, block + kStickKeys);
    cp_async_wait<0>();
    group.sync();
    if (kStages > 1 && next < end) tiles.load_queries(group, p, head, next, (stage + 1) % kStages);
    const int first = tile + warp_row;
    const RowKeys<kRowBlocks> seen(visibility, first);
    Accumulator<kRowBlocks, kStickKeys / 8> s, dp;
    if (seen.some(block, kStickKeys)) {
      StickGradients<2 * kRowBlocks, kStickKeys, kGated> sticks;
      enter_block<kFar>(sticks, p, head, seen, first, block);
      const TileRows<kRowBlocks, kD, false> queries(tiles.q(stage), warp_row);
      const TileRows<kRowBlocks, kD, false> douts(tiles.dout(stage), warp_row);
      product_with_rows(s, queries, tiles.k);
      product_with_rows(dp, douts, tiles.v);
      sticks.score(s, dp, block, scale_log2, seen, tiles.gates, dgate);
    } else {
      s.clear();
      dp.clear();
    }
    store_scores(tiles.a, warp_row, s);
    store_scores(tiles.dz, warp_row, dp);
    group.sync();
    add_transposed_product<kD>(dv, warp, part, tiles.a, tiles.dout(stage));
    add_transposed_product<kD>(dk, warp, part, tiles.dz, tiles.q(stage));
    tile = next;
    if (kStages == 1 && next < end) {
      group.sync();
      tiles.load_queries(group, p, head, next, 0);
    }
  }
  cp_async_wait<0>();
  if constexpr (kGated) {
    if (part == 0) write_gate_gradient<kFar>(group, p, head, block, dgate, tiles.gate_sums);
  }
}

// The heads of queries [begin, end) that a block walks over, of those [first, last) that share its
// head of keys.
struct KeyHeads {
  int key, first, last, begin, end;
};
// Of `heads` heads from first_head on. The block's number is read again each time: between the uses
// none of this keeps a register. Without groups there is one head.
template <bool kGrouped>
__device__ __forceinline__ KeyHeads key_heads(const StickBreakingProblem& p, int first_head,
                                              int heads, int first_key_head) {
  if constexpr (!kGrouped) {
    const int head = first_head + static_cast<int>(blockIdx.y);
    return {head, head, head + 1, head, head + 1};
  } else {
    const int key = first_key_head + static_cast<int>(read_block_y());
    const int first = key * p.group, last = first + p.group;
    return {key, first, last, max(first_head, first), min(first_head + heads, last)};
  }
}

// A block has a block of keys of one head, and walks over the queries of one head of its group
// after the other, of the `heads` heads from first_head on whose states are kept. Where that is a
// part of the group, the sums go from one launch to the next. A kernel of its own computes heads
// that form no groups, since registers for others would be spilled.
template <int kD, bool kGated, int kStages, bool kGrouped, bool kFar = false>
static __global__ void __launch_bounds__(StickThreads::kThreads,
                                         StickShape<kD, StickPass::kKey>::kBlocks)
    stick_key_gradient_kernel(const StickBreakingProblem p, int first_head, int heads,
                              int first_key_head) {
  extern __shared__ __align__(128) unsigned char memory[];
  const KeyGradientTiles<kD, kGated, kStages> tiles(memory);
  const StickThreads group;
  const int warp = group.thread() / 32;
  const int block =
      (static_cast<int>(blockIdx.x) + (kFar ? p.far.key / kStickKeys : 0)) * kStickKeys;
  const int part = kColumnParts<kD> > 1 ? static_cast<int>(blockIdx.z) : 0;
  const auto walk = [&] { return key_heads<kGrouped>(p, first_head, heads, first_key_head); };
  const KeyHeads at_first = walk();
  const StickHead first_key(p, at_first.key, at_first.key);
  load_keys<kD>(group, tiles.k, first_key, p.k, block);
  load_keys<kD>(group, tiles.v, first_key, p.v, block);
  KeyGradient<kD> dk, dv;
  dk.clear();
  dv.clear();
  if (kGrouped && at_first.begin > at_first.first) {
    const KeySums<kD> sums(p, block, part);
    sums.load(dk, 0);
    sums.load(dv, 1);
  }
  int head = at_first.begin;
#pragma unroll 1
  do {
    add_queries_of_head<kD, kGated, kStages, kFar>(dk, dv, tiles, StickHead(p, head, walk().key),
                                                   block, part);
    if (kGrouped) group.sync();  // they have been read, so those of the next head may come
  } while (kGrouped && ++head < walk().end);
  const KeyHeads at_last = walk();
  if (kGrouped && at_last.end < at_last.last) {
    const KeySums<kD> sums(p, block, part);
    sums.save(dk, 0);
    sums.save(dv, 1);
    return;
  }
  const StickHead key_head(p, at_last.key, at_last.key);
  if constexpr (kFar) {
    add_key_gradient<kD>(key_head, p.far.dk, block, warp, part, dk, p.scale);
    add_key_gradient<kD>(key_head, p.far.dv, block, warp, part, dv, 1.0f);
    return;
  }
  store_key_gradient<kD>(key_head, p.dk, block, warp, part, dk, p.scale);
  if (p.remainder == StickRemainder::kValue) {
#pragma unroll 1
    for (int n = at_last.first; n < at_last.last; ++n) {
      const StickHead of_query(p, n, at_last.key);
      for_each_key_gradient<kD>(of_query, block, warp, part, dv, [&](float& x, int key, int col) {
        const float rem = exp2_ftz(p.log2_rem[of_query.at(key)]);
        x += rem * __bfloat162float(of_query.row(p.dout, key)[col]);
      });
    }
  }
  store_key_gradient<kD>(key_head, p.dv, block, warp, part, dv, 1.0f);
}

}  // namespace sbtrain::kernels
