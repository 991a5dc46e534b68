// The kernels of softmax attention, for any way of making scores of products q.k (a policy).
//
// Tiles are aligned to the pack, not to the documents, so the grid does not depend on the packing:
// query j sees the keys [first_key(j), j], and first_key never decreases. Blocks of scores in which
// some query does not see some key are masked, those in which no query sees any are left out.
#pragma once

#include "kernels/attention/document_end.cuh"
#include "kernels/attention/softmax.h"
#include "kernels/attention/tile_products.cuh"
#include "kernels/launch.h"
#include "kernels/pack.cuh"
#include "kernels/reduce.cuh"

namespace sbtrain::kernels {
namespace {

constexpr float kLog2e = 1.4426950408889634f;
// Stands for "no key yet". Finite, so that differences with a masked score are never NaN.
constexpr float kNoMaximum = -1e30f;

// How products q.k become scores, in units of ln 2 (probabilities are 2^(score - ...)). A policy is
// a copyable struct that says so for the tiles of one warp, of one head: blockIdx.y. Masks come
// after it, so pairs that do not see each other may get any number.
struct ScaledScore {
  // Whether rows of gradients must add up to 0 as well as f32 can; o, of which delta is made, is
  // rounded to bf16.
  static constexpr bool kExactDelta = false;
  float scale_log2;

  // For tiles of a Shape::kQueries x Shape::kKeys block whose rows are queries: those of one warp
  // are `warp_row` and more behind the block's first.
  template <typename Shape>
  struct QueryRows {
    // Shared memory for what the policy wants to know of a tile's keys.
    static constexpr int stage_bytes() { return 0; }
    __device__ __forceinline__ QueryRows(const ScaledScore& policy, const SoftmaxProblem&, int, int)
        : scale_log2(policy.scale_log2) {}
    // Copies that for the keys from `begin` on, asynchronously; by all threads of the block.
    __device__ __forceinline__ void load(void*, int) {}
    // The next tile is the warp's own of the keys from `begin` on.
    __device__ __forceinline__ void enter(const void*, int) {}
    template <typename Tile>
    __device__ __forceinline__ void score(Tile& s) {
      s.for_each([&](float& x, auto) { x *= scale_log2; });
    }
    float scale_log2;
  };
  // The same with Shape::kKeys rows of keys and Shape::kQueries columns of queries.
  template <typename Shape>
  struct KeyRows {
    static constexpr int stage_bytes() { return 0; }
    static constexpr int shared_bytes() { return 0; }  // of the gradient
    __device__ __forceinline__ KeyRows(const ScaledScore& policy, const SoftmaxProblem&, int, int)
        : scale_log2(policy.scale_log2) {}
    __device__ __forceinline__ void load(void*, int) {}
    __device__ __forceinline__ void enter(const void*, int) {}
    template <typename Tile>
    __device__ __forceinline__ void score(Tile& s) {
      s.for_each([&](float& x, auto) { x *= scale_log2; });
    }
    // Gradients of what the policy has learned, from those of the scores (in nats): for each tile,
    // between calls at the beginning and the end of a block.
    __device__ __forceinline__ void begin_gradient(void*) {}
    template <typename Tile>
    __device__ __forceinline__ void add_gradient(Tile&) {}
    __device__ __forceinline__ void end_gradient() {}
    float scale_log2;
  };
};

// What the lane of query `lane_row` of this lane's in a warp's tile has: lane i has query i's.
template <typename T>
__device__ __forceinline__ T of_lane_row(T x, int lane_row) {
  return __shfl_sync(~0u, x, static_cast<int>(threadIdx.x) % 32 / 4 + lane_row * 8);
}
__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float max_of_quad(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ __nv_bfloat16* head_row(const SoftmaxProblem& p, const HeadRows& x,
                                                   int row) {
  return x.data + row * x.stride + static_cast<int>(blockIdx.y) * p.head_dim;
}
__device__ __forceinline__ int first_key(int query, int position, int window) {
  return query - (window > 0 ? min(position, window - 1) : position);
}
// Queries behind the pack see what the last one sees; nothing of them is written.
__device__ __forceinline__ int first_key(const SoftmaxProblem& p, int query) {
  const int row = min(query, p.tokens - 1);
  return first_key(row, p.positions[row], p.window);
}

// A tile of a kernel's inner loop, twice: one is computed with while the next one arrives.
template <int kRows, int kD>
__device__ __forceinline__ __nv_bfloat16* stage_of(__nv_bfloat16* first, int stage) {
  return first + stage * kRows * kD;
}
template <int kRows, int kD, int kThreads>
__device__ __forceinline__ void load_rows(__nv_bfloat16* tile, const SoftmaxProblem& p,
                                          const HeadRows& x, int row) {
  load_tile<kRows, kD, kThreads>(tile, head_row(p, x, row), x.stride, p.tokens - row, p.head_dim);
}

// What the queries of one warp see, in kernels whose tiles are of queries. Few registers: a lane
// holds one query's first key and gets those of its rows when a tile has to be masked.
template <int kRowBlocks>
struct VisibleKeys {
  static constexpr int kQueries = 16 * kRowBlocks;
  static_assert(kQueries <= 32);
  __device__ __forceinline__ VisibleKeys(const SoftmaxProblem& p, int first_query)
      : first(first_query),
        key(first_key(p, first + static_cast<int>(threadIdx.x) % kQueries)),
        lowest(__shfl_sync(~0u, key, 0)),
        highest(__shfl_sync(~0u, key, kQueries - 1)) {}
  __device__ __forceinline__ bool some(int begin, int keys) const {
    return begin < first + kQueries && begin + keys > lowest;
  }
  __device__ __forceinline__ bool all(int begin, int keys) const {
    return begin + keys <= first + 1 && begin >= highest;
  }
  int first;            // query
  int key;              // first one of the query of this lane
  int lowest, highest;  // and of the first and last query
};

// Scores become -inf where the query does not see the key.
template <int kRowBlocks, int kColBlocks>
__device__ __forceinline__ void mask_keys(Accumulator<kRowBlocks, kColBlocks>& s, int begin,
                                          const VisibleKeys<kRowBlocks>& visible) {
  if (visible.all(begin, kColBlocks * 8)) return;
  int first_keys[2 * kRowBlocks];
#pragma unroll
  for (int i = 0; i < 2 * kRowBlocks; ++i) {
    first_keys[i] = of_lane_row(visible.key, i);
  }
  s.for_each([&](float& x, auto at) {
    const int query = visible.first + at.row;
    const int key = begin + at.col;
    if (key > query || key < first_keys[at.lane_row]) x = -INFINITY;
  });
}

// ---- Forward ------------------------------------------------------------------------------------

template <int kHeadDim>
struct ForwardShape {
  static constexpr int kD = kHeadDim;
  static constexpr int kWarps = 4;
  static constexpr int kBlocks = kD == 32 ? 3 : 1;  // of a multiprocessor, at least
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRowBlocks = 2;  // of 16 queries, each warp
  static constexpr int kQueries = 16 * kRowBlocks * kWarps;
  static constexpr int kKeys = kD == 128 ? 32 : 64;
  static constexpr bool kKeepQueries = kD <= 64;
  static constexpr int kSharedBytes = 2 * kD * (kQueries + 2 * 2 * kKeys);
};

// Running maximum and sum of the lane's rows. The maximum may lag behind the scores, so that o is
// not scaled for every tile that has a larger one.
template <int kRowBlocks>
struct RunningSoftmax {
  static constexpr float kLag = 8.0f;
  __device__ __forceinline__ RunningSoftmax() {
#pragma unroll
    for (int i = 0; i < 2 * kRowBlocks; ++i) maximum[i] = kNoMaximum, sum[i] = 0.0f;
  }
  // Scores become 2^(score - maximum), and what was summed so far, o too, is scaled to it.
  template <int kKeyBlocks, int kColBlocks>
  __device__ __forceinline__ void add(Accumulator<kRowBlocks, kKeyBlocks>& s,
                                      Accumulator<kRowBlocks, kColBlocks>& o) {
    float now[2 * kRowBlocks];
#pragma unroll
    for (int i = 0; i < 2 * kRowBlocks; ++i) now[i] = maximum[i];
    s.for_each([&](float x, auto at) { now[at.lane_row] = fmaxf(now[at.lane_row], x); });
    bool behind = false;
#pragma unroll
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      now[i] = max_of_quad(now[i]);
      behind |= now[i] > maximum[i] + kLag;
    }
    if (__any_sync(~0u, behind)) rescale(now, o);
    s.for_each([&](float& x, auto at) {
      x = exp2_approximate(x - maximum[at.lane_row]);
      sum[at.lane_row] += x;  // of this lane's columns; the quad's are added at the end
    });
  }
  template <int kColBlocks>
  __device__ __forceinline__ void rescale(const float (&now)[2 * kRowBlocks],
                                          Accumulator<kRowBlocks, kColBlocks>& o) {
    float factor[2 * kRowBlocks];
#pragma unroll
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      factor[i] = exp2_approximate(maximum[i] - now[i]);
      maximum[i] = now[i];
      sum[i] *= factor[i];
    }
    o.for_each([&](float& x, auto at) { x *= factor[at.lane_row]; });
  }
  float maximum[2 * kRowBlocks], sum[2 * kRowBlocks];
};

template <typename Shape, typename Policy>
__global__ __launch_bounds__(Shape::kThreads, Shape::kBlocks) void forward_kernel(
    SoftmaxProblem p, const __grid_constant__ Policy policy) {
  constexpr int kD = Shape::kD, kKeys = Shape::kKeys, kRowBlocks = Shape::kRowBlocks;
  constexpr int kThreads = Shape::kThreads;
  extern __shared__ __align__(128) __nv_bfloat16 shared[];
  __nv_bfloat16* const q_tile = shared;
  __nv_bfloat16* const k_tiles = q_tile + Shape::kQueries * kD;
  __nv_bfloat16* const v_tiles = k_tiles + 2 * kKeys * kD;
  char* const policy_stages = reinterpret_cast<char*>(v_tiles + 2 * kKeys * kD);

  // The last queries see the most keys: they start first.
  const int first = static_cast<int>(gridDim.x - 1 - blockIdx.x) * Shape::kQueries;
  load_rows<Shape::kQueries, kD, kThreads>(q_tile, p, p.q, first);
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16 * kRowBlocks;
  const VisibleKeys<kRowBlocks> visible(p, first + warp_row);
  using Scores = typename Policy::template QueryRows<Shape>;
  Scores scores(policy, p, first, warp_row);
  const auto load_keys = [&](int key, int stage) {
    load_rows<kKeys, kD, kThreads>(stage_of<kKeys, kD>(k_tiles, stage), p, p.k, key);
    load_rows<kKeys, kD, kThreads>(stage_of<kKeys, kD>(v_tiles, stage), p, p.v, key);
    scores.load(policy_stages + stage * Scores::stage_bytes(), key);
    cp_async_commit();
  };

  const int begin = first_key(p, first) / kKeys * kKeys;
  const int end = min(first + Shape::kQueries, p.tokens);
  load_keys(begin, 0);
  TileRows<kRowBlocks, kD, Shape::kKeepQueries> q(q_tile, warp_row);
  Accumulator<kRowBlocks, kD / 8> o;
  o.clear();
  RunningSoftmax<kRowBlocks> softmax;
  for (int key = begin, stage = 0; key < end; key += kKeys, stage ^= 1) {
    cp_async_wait<0>();
    __syncthreads();
    if (key == begin) q.load();
    if (key + kKeys < end) load_keys(key + kKeys, stage ^ 1);
    if (!visible.some(key, kKeys)) continue;
    Accumulator<kRowBlocks, kKeys / 8> s;
    product_with_rows(s, q, stage_of<kKeys, kD>(k_tiles, stage));
    scores.enter(policy_stages + stage * Scores::stage_bytes(), key);
    scores.score(s);
    mask_keys(s, key, visible);
    softmax.add(s, o);
    add_product<kRowBlocks, kKeys / 8, kD>(o, s, stage_of<kKeys, kD>(v_tiles, stage));
  }

  const int rows = p.tokens - visible.first;
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < 2 * kRowBlocks; ++i) {
    softmax.sum[i] = sum_of_quad(softmax.sum[i]);
    const int row = lane / 4 + i * 8;
    if (lane % 4 == 0 && row < rows) {
      p.lse[static_cast<int64_t>(blockIdx.y) * p.tokens + visible.first + row] =
          (softmax.maximum[i] + log2f(softmax.sum[i])) / kLog2e;
    }
  }
  store_rows(head_row(p, p.o, visible.first), p.o.stride, rows, p.head_dim, o,
             [&](int i) { return 1.0f / softmax.sum[i]; });
}

// ---- Backward -----------------------------------------------------------------------------------
// P = 2^(score - lse), delta = rowsum(do o), dS = P (do v^T - delta); dv = P^T do, dk = scale dS^T
// q, dq = scale dS k. One kernel for dq and one for dk and dv, each the only writer of its rows: P
// and dS are computed twice, but nothing is added up in an order that varies. The one for dq comes
// first and, where the policy wants it, corrects delta by what the rows of dS add up to.

// Eight columns a thread.
constexpr int kDeltaThreads = 128;
template <int kD>
__global__ __launch_bounds__(kDeltaThreads) void delta_kernel(SoftmaxProblem p, float* delta_HT) {
  constexpr int kLanes = kD / 8;
  const int thread = static_cast<int>(blockIdx.x) * kDeltaThreads + static_cast<int>(threadIdx.x);
  const int row = thread / kLanes, col = thread % kLanes * 8;
  float sum = 0.0f;
  if (row < p.tokens && col < p.head_dim) {
    const Pack<float, 8> o = load_floats<8>(head_row(p, p.o, row) + col);
    const Pack<float, 8> dout = load_floats<8>(head_row(p, p.dout, row) + col);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += o[i] * dout[i];
  }
  sum = lanes_sum<kLanes>(sum);
  if (col == 0 && row < p.tokens) {
    delta_HT[static_cast<int64_t>(blockIdx.y) * p.tokens + row] = sum;
  }
}

template <int kHeadDim>
struct QueryGradientShape {
  static constexpr int kD = kHeadDim;
  static constexpr int kWarps = 4;
  static constexpr int kBlocks = kD == 32 ? 3 : 1;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRowBlocks = 2;
  static constexpr int kQueries = 16 * kRowBlocks * kWarps;
  static constexpr int kKeys = 32;
  static constexpr bool kKeepQueries = kD <= 64;
  static constexpr int kSharedBytes = 2 * kD * (2 * kQueries + 2 * 2 * kKeys);
};

template <typename Shape, typename Policy>
__global__ __launch_bounds__(Shape::kThreads, Shape::kBlocks) void query_gradient_kernel(
    SoftmaxProblem p, const __grid_constant__ Policy policy, float* delta_HT) {
  constexpr int kD = Shape::kD, kKeys = Shape::kKeys, kRowBlocks = Shape::kRowBlocks;
  constexpr int kThreads = Shape::kThreads;
  extern __shared__ __align__(128) __nv_bfloat16 shared[];
  __nv_bfloat16* const q_tile = shared;
  __nv_bfloat16* const dout_tile = q_tile + Shape::kQueries * kD;
  __nv_bfloat16* const k_tiles = dout_tile + Shape::kQueries * kD;
  __nv_bfloat16* const v_tiles = k_tiles + 2 * kKeys * kD;
  char* const policy_stages = reinterpret_cast<char*>(v_tiles + 2 * kKeys * kD);

  const int first = static_cast<int>(gridDim.x - 1 - blockIdx.x) * Shape::kQueries;
  load_rows<Shape::kQueries, kD, kThreads>(q_tile, p, p.q, first);
  load_rows<Shape::kQueries, kD, kThreads>(dout_tile, p, p.dout, first);
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16 * kRowBlocks;
  const VisibleKeys<kRowBlocks> visible(p, first + warp_row);
  using Scores = typename Policy::template QueryRows<Shape>;
  Scores scores(policy, p, first, warp_row);
  const auto load_keys = [&](int key, int stage) {
    load_rows<kKeys, kD, kThreads>(stage_of<kKeys, kD>(k_tiles, stage), p, p.k, key);
    load_rows<kKeys, kD, kThreads>(stage_of<kKeys, kD>(v_tiles, stage), p, p.v, key);
    scores.load(policy_stages + stage * Scores::stage_bytes(), key);
    cp_async_commit();
  };
  // Of the query of this lane.
  const int query = visible.first + static_cast<int>(threadIdx.x) % (16 * kRowBlocks);
  const int64_t at = static_cast<int64_t>(blockIdx.y) * p.tokens + min(query, p.tokens - 1);
  const float lse_log2 =
      query < p.tokens ? p.lse[at] * kLog2e : INFINITY;  // behind the pack: P = 0
  const float delta = delta_HT[at];

  const int begin = first_key(p, first) / kKeys * kKeys;
  const int end = min(first + Shape::kQueries, p.tokens);
  load_keys(begin, 0);
  TileRows<kRowBlocks, kD, Shape::kKeepQueries> q(q_tile, warp_row), dout(dout_tile, warp_row);
  Accumulator<kRowBlocks, kD / 8> dq;
  dq.clear();
  float residual[2 * kRowBlocks] = {};  // what the rows of ds add up to
  for (int key = begin, stage = 0; key < end; key += kKeys, stage ^= 1) {
    cp_async_wait<0>();
    __syncthreads();
    if (key == begin) q.load(), dout.load();
    if (key + kKeys < end) load_keys(key + kKeys, stage ^ 1);
    if (!visible.some(key, kKeys)) continue;
    Accumulator<kRowBlocks, kKeys / 8> s, ds;
    product_with_rows(s, q, stage_of<kKeys, kD>(k_tiles, stage));
    scores.enter(policy_stages + stage * Scores::stage_bytes(), key);
    scores.score(s);
    mask_keys(s, key, visible);
    float lse_log2_of[2 * kRowBlocks], delta_of[2 * kRowBlocks];
#pragma unroll
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      lse_log2_of[i] = of_lane_row(lse_log2, i);
      delta_of[i] = of_lane_row(delta, i);
    }
    s.for_each([&](float& x, auto at) { x = exp2_approximate(x - lse_log2_of[at.lane_row]); });
    product_with_rows(ds, dout, stage_of<kKeys, kD>(v_tiles, stage));
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
      for (int c = 0; c < kKeys / 8; ++c) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          ds.at[r][c][i] = s.at[r][c][i] * (ds.at[r][c][i] - delta_of[r * 2 + i / 2]);
        }
      }
    }
    if constexpr (Policy::kExactDelta) {
      ds.for_each([&](float x, auto at) { residual[at.lane_row] += x; });
    }
    add_product<kRowBlocks, kKeys / 8, kD>(dq, ds, stage_of<kKeys, kD>(k_tiles, stage));
  }
  if constexpr (Policy::kExactDelta) {
#pragma unroll
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      const int row = static_cast<int>(threadIdx.x) % 32 / 4 + i * 8;
      const float exact = of_lane_row(delta, i) + sum_of_quad(residual[i]);
      if (threadIdx.x % 4 == 0 && visible.first + row < p.tokens) {
        delta_HT[static_cast<int64_t>(blockIdx.y) * p.tokens + visible.first + row] = exact;
      }
    }
  }
  store_rows(head_row(p, p.dq, visible.first), p.dq.stride, p.tokens - visible.first, p.head_dim,
             dq, [&](int) { return p.scale; });
}

template <int kHeadDim>
struct KeyGradientShape {
  static constexpr int kD = kHeadDim;
  // Pairs of warps share keys: one makes P^T and dv, the other dS^T and dk. One warp's registers do
  // not hold both of 32 keys, and with fewer keys the reads of q and do would take longer than the
  // products.
  static constexpr bool kPairs = kD == 128;
  static constexpr int kWarps = kPairs ? 8 : 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRowBlocks = 2;  // of 16 keys, each warp or pair
  static constexpr int kKeys = 16 * kRowBlocks * (kPairs ? kWarps / 2 : kWarps);
  static constexpr int kQueries = kPairs ? 48 : 32;
  // Two stages of q, do and of the queries' lse, delta and positions.
  static constexpr int kStagesBytes =
      2 * kD * (2 * kKeys + 2 * 2 * kQueries) + 2 * 3 * 4 * kQueries;
  static constexpr int kSharedBytes = kStagesBytes + (kPairs ? 4 * kKeys * kQueries : 0);
};

// What the inner loop over queries knows of each: [kQueries] in shared memory.
struct QueryValues {
  float* lse;
  float* delta;
  int* position;
};

// P^T [keys, queries] of one warp from the scores.
template <int kRowBlocks, int kColBlocks>
__device__ __forceinline__ void to_probabilities(Accumulator<kRowBlocks, kColBlocks>& s,
                                                 int first_row, int first_query, int window,
                                                 bool masked, const QueryValues& values) {
  const int row = static_cast<int>(threadIdx.x) % 32 / 4;
  const int col = static_cast<int>(threadIdx.x) % 4 * 2;
  const auto apply = [&](auto is_masked) {
#pragma unroll
    for (int c = 0; c < kColBlocks; ++c) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int in_tile = c * 8 + col + odd;
        const int query = first_query + in_tile;
        const float lse_log2 = values.lse[in_tile] * kLog2e;
        const int lowest = is_masked() ? first_key(query, values.position[in_tile], window) : 0;
#pragma unroll
        for (int r = 0; r < 2 * kRowBlocks; ++r) {
          const int key = first_row + row + r * 8;
          float& x = s.at[r / 2][c][r % 2 * 2 + odd];
          x = exp2_approximate(x - lse_log2);
          if (is_masked() && (key > query || key < lowest)) x = 0.0f;
        }
      }
    }
  };
  if (masked) {
    apply([] { return true; });
  } else {
    apply([] { return false; });
  }
}

// dS^T from the products v do^T and P^T: probability(row block, column block) are four numbers.
template <int kRowBlocks, int kColBlocks, typename Probability>
__device__ __forceinline__ void to_gradients(Accumulator<kRowBlocks, kColBlocks>& ds,
                                             const QueryValues& values, Probability&& probability) {
  const int col = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int c = 0; c < kColBlocks; ++c) {
    const float2 delta = *reinterpret_cast<const float2*>(values.delta + c * 8 + col);
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
      const float4 x = probability(r, c);
      float(&dx)[4] = ds.at[r][c];
      dx[0] = x.x * (dx[0] - delta.x);
      dx[1] = x.y * (dx[1] - delta.y);
      dx[2] = x.z * (dx[2] - delta.x);
      dx[3] = x.w * (dx[3] - delta.y);
    }
  }
}

// Accumulators that one warp hands to the other of its pair, in shared memory.
template <int kRowBlocks, int kColBlocks>
class SharedAccumulator {
 public:
  static constexpr int kFloats = kRowBlocks * kColBlocks * 128;
  __device__ __forceinline__ explicit SharedAccumulator(float* first)
      : lane_(reinterpret_cast<float4*>(first) + threadIdx.x % 32) {}
  __device__ __forceinline__ void store(const Accumulator<kRowBlocks, kColBlocks>& x) const {
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
      for (int c = 0; c < kColBlocks; ++c) {
        const float(&four)[4] = x.at[r][c];
        lane_[(r * kColBlocks + c) * 32] = make_float4(four[0], four[1], four[2], four[3]);
      }
    }
  }
  __device__ __forceinline__ float4 at(int r, int c) const {
    return lane_[(r * kColBlocks + c) * 32];
  }

 private:
  float4* lane_;
};
// Waits for the other warp of pair `pair`. It orders what goes through SharedAccumulator and
// nothing else: between a copy to a tile and the reads of it lies a __syncthreads() of the whole
// block, with pairs or without. compute-sanitizer's racecheck (CUDA 13.0) reports these copies all
// the same, in kernels with pairs alone.
__device__ __forceinline__ void sync_pair(int pair) {
  asm volatile("bar.sync %0, 64;\n" ::"r"(pair + 1) : "memory");
}

template <typename Shape, typename Policy>
__global__ __launch_bounds__(Shape::kThreads) void key_gradient_kernel(
    SoftmaxProblem p, const __grid_constant__ Policy policy, const float* delta_HT) {
  constexpr int kD = Shape::kD, kQueries = Shape::kQueries, kRowBlocks = Shape::kRowBlocks;
  constexpr int kThreads = Shape::kThreads, kGroups = Shape::kKeys / (16 * kRowBlocks);
  using Scores = typename Policy::template KeyRows<Shape>;
  using Tile = Accumulator<kRowBlocks, kQueries / 8>;
  using Exchange = SharedAccumulator<kRowBlocks, kQueries / 8>;
  extern __shared__ __align__(128) __nv_bfloat16 shared[];
  __nv_bfloat16* const k_tile = shared;
  __nv_bfloat16* const v_tile = k_tile + Shape::kKeys * kD;
  __nv_bfloat16* const q_tiles = v_tile + Shape::kKeys * kD;
  __nv_bfloat16* const dout_tiles = q_tiles + 2 * kQueries * kD;
  float* const values_of_stages = reinterpret_cast<float*>(dout_tiles + 2 * kQueries * kD);
  const auto values_of = [&](int stage) {
    float* const at = values_of_stages + stage * 3 * kQueries;
    return QueryValues{at, at + kQueries, reinterpret_cast<int*>(at + 2 * kQueries)};
  };
  float* const exchanges = values_of_stages + 2 * 3 * kQueries;
  char* const policy_stages = reinterpret_cast<char*>(shared) + Shape::kSharedBytes;

  const int first = static_cast<int>(blockIdx.x) * Shape::kKeys;
  const int warp = static_cast<int>(threadIdx.x) / 32, group = warp % kGroups;
  const int warp_row = group * 16 * kRowBlocks;
  const int warp_first = first + warp_row;  // keys of the warp
  const int warp_last = warp_first + 16 * kRowBlocks - 1;
  Scores scores(policy, p, first, warp_row);
  const auto load_queries = [&](int query, int stage) {
    load_rows<kQueries, kD, kThreads>(stage_of<kQueries, kD>(q_tiles, stage), p, p.q, query);
    load_rows<kQueries, kD, kThreads>(stage_of<kQueries, kD>(dout_tiles, stage), p, p.dout, query);
    const QueryValues to = values_of(stage);
#pragma unroll
    for (int begin = 0; begin < 3 * kQueries; begin += kThreads) {
      const int n = begin + static_cast<int>(threadIdx.x);
      const int i = n % kQueries, which = n / kQueries;
      const bool valid = query + i < p.tokens;  // queries behind the pack: do = 0 and delta = 0
      const int row = valid ? query + i : 0;
      const int64_t at = static_cast<int64_t>(blockIdx.y) * p.tokens + row;
      if (which == 0) cp_async4(shared_address(to.lse + i), p.lse + at, valid);
      if (which == 1) cp_async4(shared_address(to.delta + i), delta_HT + at, valid);
      if (which == 2) cp_async4(shared_address(to.position + i), p.positions + row, valid);
    }
    scores.load(policy_stages + stage * Scores::stage_bytes(), query);
    cp_async_commit();
  };

  load_rows<Shape::kKeys, kD, kThreads>(k_tile, p, p.k, first);
  load_rows<Shape::kKeys, kD, kThreads>(v_tile, p, p.v, first);
  load_queries(first, 0);
  const int last = min(first + Shape::kKeys, p.tokens) - 1;
  const int end =
      p.window > 0 ? min(document_end(p, last), last + p.window) : document_end(p, last);
  // With pairs the second warp's rows are of v, and it adds up dk alone; the first one's dv.
  const bool makes_gradients = Shape::kPairs && warp >= kGroups;
  const TileRows<kRowBlocks, kD, false> k(makes_gradients ? v_tile : k_tile, warp_row);
  const TileRows<kRowBlocks, kD, false> v(v_tile, warp_row);
  Accumulator<kRowBlocks, kD / 8> dk, dv;
  dk.clear();
  dv.clear();
  scores.begin_gradient(policy_stages + 2 * Scores::stage_bytes());
  for (int query = first, stage = 0; query < end; query += kQueries, stage ^= 1) {
    cp_async_wait<0>();
    __syncthreads();
    if (query + kQueries < end) load_queries(query + kQueries, stage ^ 1);
    const QueryValues values = values_of(stage);
    const int lowest = first_key(query, values.position[0], p.window);
    const int highest = first_key(query + kQueries - 1, values.position[kQueries - 1], p.window);
    if (query + kQueries <= warp_first || lowest > warp_last) continue;
    const bool masked = query < warp_last || highest > warp_first;
    const __nv_bfloat16* const q_tile = stage_of<kQueries, kD>(q_tiles, stage);
    const __nv_bfloat16* const dout_tile = stage_of<kQueries, kD>(dout_tiles, stage);
    scores.enter(policy_stages + stage * Scores::stage_bytes(), query);
    Tile s, ds;
    if constexpr (Shape::kPairs) {
      const Exchange exchange(exchanges + group * Exchange::kFloats);
      product_with_rows(s, k, makes_gradients ? dout_tile : q_tile);
      if (!makes_gradients) {
        scores.score(s);
        to_probabilities(s, warp_first, query, p.window, masked, values);
        exchange.store(s);
        sync_pair(group);
      } else {
        sync_pair(group);
        to_gradients(s, values, [&](int r, int c) { return exchange.at(r, c); });
        scores.add_gradient(s);
      }
      add_product<kRowBlocks, kQueries / 8, kD>(dv, s, makes_gradients ? q_tile : dout_tile);
    } else {
      product_with_rows(s, k, q_tile);
      product_with_rows(ds, v, dout_tile);
      scores.score(s);
      to_probabilities(s, warp_first, query, p.window, masked, values);
      to_gradients(ds, values, [&](int r, int c) {
        const float(&x)[4] = s.at[r][c];
        return make_float4(x[0], x[1], x[2], x[3]);
      });
      add_product<kRowBlocks, kQueries / 8, kD>(dv, s, dout_tile);
      scores.add_gradient(ds);
      add_product<kRowBlocks, kQueries / 8, kD>(dk, ds, q_tile);
    }
  }
  scores.end_gradient();
  const int rows = p.tokens - warp_first;
  const auto store = [&](const HeadRows& to, const auto& x, float factor) {
    store_rows(head_row(p, to, warp_first), to.stride, rows, p.head_dim, x,
               [&](int) { return factor; });
  };
  if constexpr (Shape::kPairs) {
    store(makes_gradients ? p.dk : p.dv, dv, makes_gradients ? p.scale : 1.0f);
  } else {
    store(p.dk, dk, p.scale);
    store(p.dv, dv, 1.0f);
  }
}

// ---- Launches -----------------------------------------------------------------------------------

dim3 grid_of(const SoftmaxProblem& p, int rows) {
  return dim3((p.tokens + rows - 1) / rows, p.heads);
}

template <typename Shape, typename Kernel, typename... Arguments>
cudaError_t launch(cudaStream_t stream, Kernel* kernel, dim3 grid, int policy_bytes,
                   Arguments... arguments) {
  const int shared_bytes = Shape::kSharedBytes + policy_bytes;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  kernel<<<grid, Shape::kThreads, shared_bytes, stream>>>(arguments...);
  return cudaGetLastError();
}

template <int kD, typename Policy>
cudaError_t launch_forward(cudaStream_t stream, const SoftmaxProblem& p, const Policy& policy) {
  using Shape = ForwardShape<kD>;
  constexpr int kPolicyBytes = 2 * Policy::template QueryRows<Shape>::stage_bytes();
  return launch<Shape>(stream, forward_kernel<Shape, Policy>, grid_of(p, Shape::kQueries),
                       kPolicyBytes, p, policy);
}

template <int kD, typename Policy>
cudaError_t launch_backward(cudaStream_t stream, const SoftmaxProblem& p, const Policy& policy,
                            float* delta) {
  using Queries = QueryGradientShape<kD>;
  using Keys = KeyGradientShape<kD>;
  using KeyScores = typename Policy::template KeyRows<Keys>;
  delta_kernel<kD><<<grid_of(p, kDeltaThreads * 8 / kD), kDeltaThreads, 0, stream>>>(p, delta);
  cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  constexpr int kQueryBytes = 2 * Policy::template QueryRows<Queries>::stage_bytes();
  error = launch<Queries>(stream, query_gradient_kernel<Queries, Policy>,
                          grid_of(p, Queries::kQueries), kQueryBytes, p, policy, delta);
  if (error != cudaSuccess) return error;
  constexpr int kKeyBytes = 2 * KeyScores::stage_bytes() + KeyScores::shared_bytes();
  return launch<Keys>(stream, key_gradient_kernel<Keys, Policy>, grid_of(p, Keys::kKeys), kKeyBytes,
                      p, policy, static_cast<const float*>(delta));
}

// body(Int<kD>) with the tile width for the problem's head dimension.
template <typename Body>
cudaError_t with_head_dim(const SoftmaxProblem& p, Body&& body) {
  if (p.head_dim > 128 || p.head_dim % 8 != 0) return cudaErrorInvalidValue;
  if (p.tokens == 0) return cudaSuccess;
  if (p.head_dim <= 32) return body(Int<32>{});
  if (p.head_dim <= 64) return body(Int<64>{});
  return body(Int<128>{});
}

template <typename Policy>
cudaError_t forward(cudaStream_t stream, const SoftmaxProblem& p, const Policy& policy) {
  return with_head_dim(
      p, [&](auto d) { return launch_forward<decltype(d)::value>(stream, p, policy); });
}

template <typename Policy>
cudaError_t backward(cudaStream_t stream, const SoftmaxProblem& p, const Policy& policy,
                     float* delta) {
  return with_head_dim(
      p, [&](auto d) { return launch_backward<decltype(d)::value>(stream, p, policy, delta); });
}

}  // namespace
}  // namespace sbtrain::kernels
