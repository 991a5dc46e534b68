// Softmax attention backward: P = 2^(score - lse), delta = rowsum(do o), dS = P (do v^T - delta);
// dv = P^T do, dk = scale dS^T q, dq = scale dS k. One kernel for dq and one for dk and dv, each
// the only writer of its rows: P and dS are computed twice, but nothing is added up in an order
// that varies. The one for dq comes first and, if the policy asks for it, corrects delta by the
// sums of the rows of dS.
#pragma once

#include "kernels/attention/coordinates.cuh"
#include "kernels/attention/epilogue.cuh"
#include "kernels/attention/softmax_tiles.cuh"
#include "kernels/pack.cuh"
#include "kernels/reduce.cuh"

namespace sbtrain::kernels {

// ---- delta --------------------------------------------------------------------------------------

// Each thread takes eight columns.
inline constexpr int kDeltaThreads = 128;
template <int kD>
static __global__ __launch_bounds__(kDeltaThreads) void softmax_delta_kernel(SoftmaxProblem p,
                                                                             float* delta_HT) {
  constexpr int kLanes = kD / 8;
  const SoftmaxHead head(p, static_cast<int>(blockIdx.y), 0);
  const int thread = static_cast<int>(blockIdx.x) * kDeltaThreads + static_cast<int>(threadIdx.x);
  const int row = thread / kLanes, col = thread % kLanes * 8;
  float sum = 0.0f;
  if (row < p.tokens && col < p.head_dim) {
    const Pack<float, 8> o = load_floats<8>(head.row(p.o, row) + col);
    const Pack<float, 8> dout = load_floats<8>(head.row(p.dout, row) + col);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += o[i] * dout[i];
  }
  sum = lanes_sum<kLanes>(sum);
  if (col == 0 && row < p.tokens) delta_HT[head.at(row)] = sum;
}

// ---- dq -----------------------------------------------------------------------------------------

template <int kHeadDim>
struct SoftmaxQueryShape {
  static constexpr int kD = kHeadDim;
  static constexpr int kWarps = 4;
  static constexpr int kBlocks = kD == 32 ? 3 : 1;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRowBlocks = kD > 128 ? 1 : 2;
  static constexpr int kQueries = 16 * kRowBlocks * kWarps;
  static constexpr int kKeys = 32;
  static constexpr bool kKeepQueries = kD <= 64;
  static constexpr int kSharedBytes = 2 * kD * (2 * kQueries + 2 * 2 * kKeys);
};

// The values of this lane's query, one of the warp's 16 * kRowBlocks queries from `first` on.
struct LaneQuery {
  float lse_log2, delta;
  template <typename Keys>
  __device__ __forceinline__ LaneQuery(const SoftmaxProblem& p, const SoftmaxHead& head,
                                       const Keys& seen, const float* delta_HT) {
    const int query = seen.first + lane() % Keys::kQueries;
    const int64_t at = head.at(min(query, p.tokens - 1));
    lse_log2 = query < p.tokens ? p.lse[at] * kLog2e : INFINITY;  // beyond the pack: P = 0
    delta = delta_HT[at];
  }
};

// s = P of the scores s and dS of the products do v^T, which product(ds) forms.
template <int kRowBlocks, int kColBlocks, typename Product>
__device__ __forceinline__ void to_query_gradients(Accumulator<kRowBlocks, kColBlocks>& s,
                                                   Accumulator<kRowBlocks, kColBlocks>& ds,
                                                   const LaneQuery& query, Product&& product) {
  float lse_log2[2 * kRowBlocks], delta[2 * kRowBlocks];
#pragma unroll
  for (int i = 0; i < 2 * kRowBlocks; ++i) {
    lse_log2[i] = of_lane_row(query.lse_log2, i);
    delta[i] = of_lane_row(query.delta, i);
  }
  s.for_each([&](float& x, auto at) { x = exp2_ftz(x - lse_log2[at.lane_row]); });
  product(ds);
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
    for (int c = 0; c < kColBlocks; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ds.at[r][c][i] = s.at[r][c][i] * (ds.at[r][c][i] - delta[r * 2 + i / 2]);
      }
    }
  }
}

// delta += the sums of the rows of dS, which would be 0 without rounding.
template <int kRowBlocks>
__device__ __forceinline__ void correct_delta(const SoftmaxProblem& p, const SoftmaxHead& head,
                                              int first, float delta,
                                              const float (&residual)[2 * kRowBlocks],
                                              float* delta_HT) {
#pragma unroll
  for (int i = 0; i < 2 * kRowBlocks; ++i) {
    const int row = lane_row() + i * 8;
    const float exact = of_lane_row(delta, i) + quad_sum(residual[i]);
    if (quad_lane() == 0 && first + row < p.tokens) delta_HT[head.at(first) + row] = exact;
  }
}

template <typename Shape, typename Policy, typename Problem = SoftmaxProblem>
static __global__ __launch_bounds__(
    Shape::kThreads,
    Shape::kBlocks) void softmax_query_gradient_kernel(Problem p,
                                                       const __grid_constant__ Policy policy,
                                                       float* delta_HT) {
  constexpr int kD = Shape::kD, kKeys = Shape::kKeys, kRowBlocks = Shape::kRowBlocks;
  using Scores = typename Policy::template QueryRows<Shape>;
  using Keys = TileStages<kKeys, kD>;
  extern __shared__ __align__(128) unsigned char shared[];
  auto* const q_tile = reinterpret_cast<__nv_bfloat16*>(shared);
  __nv_bfloat16* const dout_tile = q_tile + Shape::kQueries * kD;
  const Keys k_tiles{dout_tile + Shape::kQueries * kD};
  const Keys v_tiles{k_tiles.first + Keys::kElements};
  char* const policy_stages = reinterpret_cast<char*>(v_tiles.first + Keys::kElements);

  const BlockThreads<Shape::kThreads> group;
  const SoftmaxHead head = head_of_block<SoftmaxProblem>(p);
  const SoftmaxHead key_head = head.of_keys();
  const int first = static_cast<int>(gridDim.x - 1 - blockIdx.x) * Shape::kQueries;
  load_rows<Shape::kQueries, kD>(group, q_tile, head, p.q, first);
  load_rows<Shape::kQueries, kD>(group, dout_tile, head, p.dout, first);
  const int warp_row = group.warp() * 16 * kRowBlocks;
  const Visibility visibility = visibility_of(p);
  const LaneKeys<kRowBlocks, kIsFar<Problem>> seen(visibility, first + warp_row);
  Scores scores(policy, {head.index, first, warp_row});
  const auto load_keys = [&](int key, int stage) {
    load_rows<kKeys, kD>(group, k_tiles.at(stage), key_head, p.k, key);
    load_rows<kKeys, kD>(group, v_tiles.at(stage), key_head, p.v, key);
    scores.load(group, policy_stages + stage * Scores::stage_bytes(), key);
    cp_async_commit();
  };
  const LaneQuery query(p, head, seen, delta_HT);

  const int begin = visibility.first_key(first) / kKeys * kKeys;
  const int end = kIsFar<Problem> ? p.tokens : min(first + Shape::kQueries, p.tokens);
  if (kIsFar<Problem> && begin >= end) return;  // a window hides all keys
  load_keys(begin, 0);
  TileRows<kRowBlocks, kD, Shape::kKeepQueries> q(q_tile, warp_row), dout(dout_tile, warp_row);
  Accumulator<kRowBlocks, kD / 8> dq;
  dq.clear();
  float residual[2 * kRowBlocks] = {};  // sums of the rows of ds
  for (int key = begin, stage = 0; key < end; key += kKeys, stage ^= 1) {
    cp_async_wait<0>();
    group.sync();
    if (key == begin) q.load(), dout.load();
    if (key + kKeys < end) load_keys(key + kKeys, stage ^ 1);
    if (!seen.some(key, kKeys)) continue;
    Accumulator<kRowBlocks, kKeys / 8> s, ds;
    product_with_rows(s, q, k_tiles.at(stage));
    scores.enter(policy_stages + stage * Scores::stage_bytes(), key - distance_of(p));
    scores.score(s);
    seen.mask(s, key);
    to_query_gradients(s, ds, query,
                       [&](auto& to) { product_with_rows(to, dout, v_tiles.at(stage)); });
    if constexpr (Policy::kExactDelta) {
      ds.for_each([&](float x, auto at) { residual[at.lane_row] += x; });
    }
    add_product<kRowBlocks, kKeys / 8, kD>(dq, ds, k_tiles.at(stage));
  }
  if constexpr (Policy::kExactDelta) {
    correct_delta<kRowBlocks>(p, head, seen.first, query.delta, residual, delta_HT);
  }
  const auto scaled = [&](int) { return p.scale; };
  if constexpr (kIsFar<Problem>) {
    add_rows(sum_row(head, p.dq_sum, seen.first), p.dq_sum.stride, p.queries - seen.first,
             p.head_dim, dq, scaled);
  } else {
    store_rows(head.row(p.dq, seen.first), p.dq.stride, p.tokens - seen.first, p.head_dim, dq,
               scaled);
  }
}

// ---- dk and dv ----------------------------------------------------------------------------------

template <int kHeadDim>
struct SoftmaxKeyShape {
  static constexpr int kD = kHeadDim;
  // Pairs of warps share keys: one makes P^T and dv, the other dS^T and dk. One warp's registers do
  // not hold both of 32 keys, and with fewer keys the reads of q and do would take longer than the
  // products.
  static constexpr bool kPairs = kD >= 128;
  static constexpr int kWarps = kPairs ? 8 : 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRowBlocks = kD > 128 ? 1 : 2;  // of 16 keys, each warp or pair
  static constexpr int kKeys = 16 * kRowBlocks * (kPairs ? kWarps / 2 : kWarps);
  static constexpr int kQueries = kD == 128 ? 48 : 32;
  // Two stages of q, do and of the queries' lse, delta and positions.
  static constexpr int kStagesBytes =
      2 * kD * (2 * kKeys + 2 * 2 * kQueries) + 2 * 3 * 4 * kQueries;
  static constexpr int kSharedBytes = kStagesBytes + (kPairs ? 4 * kKeys * kQueries : 0);
};

// What the inner loop needs to know of each query: [kQueries] in shared memory.
struct QueryValues {
  float* lse;
  float* delta;
  int* position;
};

// Copies them for the queries from `first` on, asynchronously. Those beyond the pack get zeros:
// with do = 0 and delta = 0 their dS is 0.
template <int kQueries, typename Group>
__device__ __forceinline__ void load_values(const Group& group, const QueryValues& to,
                                            const SoftmaxProblem& p, const SoftmaxHead& head,
                                            const float* delta_HT, int first) {
#pragma unroll
  for (int begin = 0; begin < 3 * kQueries; begin += Group::kThreads) {
    const int n = begin + group.thread();
    const int i = n % kQueries, which = n / kQueries;
    const bool valid = first + i < p.tokens;
    const int row = valid ? first + i : 0;
    const int64_t at = head.at(row);
    if (which == 0) cp_async4(shared_address(to.lse + i), p.lse + at, valid);
    if (which == 1) cp_async4(shared_address(to.delta + i), delta_HT + at, valid);
    // Those of another rank's keys need no position.
    if (which == 2 && p.positions) {
      cp_async4(shared_address(to.position + i), p.positions + row, valid);
    }
  }
}

// The first key of query i of the tile.
__device__ __forceinline__ int first_key_of(const Visibility& visibility, int query,
                                            const QueryValues& values, int i) {
  return visibility.far ? visibility.first_key(query)
                        : visibility.first_key(query, values.position[i]);
}

// P of another rank's keys becomes zero for the queries that do not see them. Keys, which are the
// lane's rows, come one after the other: that takes one register.
template <int kRowBlocks, int kColBlocks>
__device__ __forceinline__ void hide_far_queries(Accumulator<kRowBlocks, kColBlocks>& p,
                                                 int first_key, int first_query,
                                                 const Visibility& visibility) {
#pragma unroll
  for (int r = 0; r < 2 * kRowBlocks; ++r) {
    const int end = visibility.end_query(first_key + r * 8) - first_query;
#pragma unroll
    for (int c = 0; c < kColBlocks; ++c) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        if (c * 8 + odd >= end) p.at[r / 2][c][r % 2 * 2 + odd] = 0.0f;
      }
    }
  }
}

// P^T [keys, queries] of one warp from the scores; its keys are those from `first_key` on.
template <int kRowBlocks, int kColBlocks>
__device__ __forceinline__ void to_probabilities(Accumulator<kRowBlocks, kColBlocks>& s,
                                                 int first_key, int first_query,
                                                 const Visibility& visibility, bool masked,
                                                 const QueryValues& values) {
  const int row = lane_row(), col = lane_col();
  const auto apply = [&](auto is_masked) {
#pragma unroll
    for (int c = 0; c < kColBlocks; ++c) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int in_tile = c * 8 + col + odd;
        const int query = first_query + in_tile;
        const float lse_log2 = values.lse[in_tile] * kLog2e;
        const int lowest = is_masked() ? visibility.first_key(query, values.position[in_tile]) : 0;
#pragma unroll
        for (int r = 0; r < 2 * kRowBlocks; ++r) {
          const int key = first_key + row + r * 8;
          float& x = s.at[r / 2][c][r % 2 * 2 + odd];
          x = exp2_ftz(x - lse_log2);
          if (is_masked() && (key > query || key < lowest)) x = 0.0f;
        }
      }
    }
  };
  if (masked && !visibility.far) {
    apply([] { return true; });
  } else {
    apply([] { return false; });
  }
  if (masked && visibility.far) {
    hide_far_queries(s, first_key + row, first_query + col, visibility);
  }
}

// dS^T from the products v do^T and P^T: probability(row block, column block) are four numbers.
template <int kRowBlocks, int kColBlocks, typename Probability>
__device__ __forceinline__ void to_gradients(Accumulator<kRowBlocks, kColBlocks>& ds,
                                             const QueryValues& values, Probability&& probability) {
#pragma unroll
  for (int c = 0; c < kColBlocks; ++c) {
    const float2 delta = *reinterpret_cast<const float2*>(values.delta + c * 8 + lane_col());
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
      : lane_(reinterpret_cast<float4*>(first) + lane()) {}
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

// Waits for the other warp of pair `pair`. It orders only what goes through SharedAccumulator: with
// or without pairs, a barrier of the whole block lies between a copy to a tile and the reads of the
// tile. compute-sanitizer's racecheck (CUDA 13.0) nevertheless reports these copies in kernels with
// pairs, and in no others, which is therefore taken for an error of the tool.
__device__ __forceinline__ void sync_pair(int pair) {
  sync_threads<64>(pair + 1);
}

// The layout of shared memory.
template <typename Shape, typename Scores>
struct SoftmaxKeyTiles {
  static constexpr int kD = Shape::kD, kQueries = Shape::kQueries;
  using Queries = TileStages<kQueries, kD>;
  __device__ __forceinline__ explicit SoftmaxKeyTiles(unsigned char* shared)
      : k(reinterpret_cast<__nv_bfloat16*>(shared)),
        v(k + Shape::kKeys * kD),
        q{v + Shape::kKeys * kD},
        dout{q.first + Queries::kElements},
        values_of_stages(reinterpret_cast<float*>(dout.first + Queries::kElements)),
        exchanges(values_of_stages + 2 * 3 * kQueries),
        policy_stages(reinterpret_cast<char*>(shared) + Shape::kSharedBytes) {}
  __device__ __forceinline__ QueryValues values(int stage) const {
    float* const at = values_of_stages + stage * 3 * kQueries;
    return QueryValues{at, at + kQueries, reinterpret_cast<int*>(at + 2 * kQueries)};
  }
  __device__ __forceinline__ char* policy(int stage) const {
    return policy_stages + stage * Scores::stage_bytes();
  }
  __nv_bfloat16 *k, *v;
  Queries q, dout;
  float *values_of_stages, *exchanges;
  char* policy_stages;
};

// The gradients of one warp's keys. With pairs the second warp's rows are of v, and it adds up only
// dk, in the member dv; the first warp adds up only dv.
template <typename Shape>
struct SoftmaxKeyGradients {
  static constexpr int kD = Shape::kD, kRowBlocks = Shape::kRowBlocks;
  static constexpr int kColBlocks = Shape::kQueries / 8;
  static constexpr int kGroups = Shape::kKeys / (16 * kRowBlocks);
  using Tile = Accumulator<kRowBlocks, kColBlocks>;
  using Exchange = SharedAccumulator<kRowBlocks, kColBlocks>;
  using Rows = TileRows<kRowBlocks, kD, false>;

  // to_p(s) makes P^T of the scores.
  template <typename Scores, typename ToProbabilities>
  __device__ __forceinline__ void add(Scores& scores, const Rows& k, const Rows& v,
                                      const __nv_bfloat16* q_tile, const __nv_bfloat16* dout_tile,
                                      const QueryValues& values, ToProbabilities&& to_p) {
    Tile s, ds;
    product_with_rows(s, k, q_tile);
    product_with_rows(ds, v, dout_tile);
    scores.score(s);
    to_p(s);
    to_gradients(ds, values, [&](int r, int c) {
      const float(&x)[4] = s.at[r][c];
      return make_float4(x[0], x[1], x[2], x[3]);
    });
    add_product<kRowBlocks, kColBlocks, kD>(dv, s, dout_tile);
    scores.add_gradient(ds);
    add_product<kRowBlocks, kColBlocks, kD>(dk, ds, q_tile);
  }
  // The same by the two warps of pair `pair`; `rows` are of v where `second`.
  template <typename Scores, typename ToProbabilities>
  __device__ __forceinline__ void add_by_pair(Scores& scores, int pair, bool second,
                                              float* exchanges, const Rows& rows,
                                              const __nv_bfloat16* q_tile,
                                              const __nv_bfloat16* dout_tile,
                                              const QueryValues& values, ToProbabilities&& to_p) {
    Tile s;
    const Exchange exchange(exchanges + pair * Exchange::kFloats);
    product_with_rows(s, rows, second ? dout_tile : q_tile);
    if (!second) {
      scores.score(s);
      to_p(s);
      exchange.store(s);
      sync_pair(pair);
    } else {
      sync_pair(pair);
      to_gradients(s, values, [&](int r, int c) { return exchange.at(r, c); });
      scores.add_gradient(s);
    }
    add_product<kRowBlocks, kColBlocks, kD>(dv, s, second ? q_tile : dout_tile);
  }
  __device__ __forceinline__ void write(const SoftmaxFarProblem& p, const SoftmaxHead& head,
                                        int first, bool second) const {
    const auto add = [&](const Matrix<float>& to, const auto& x, float factor) {
      add_rows(sum_row(head, to, first), to.stride, p.tokens - first, p.head_dim, x,
               [&](int) { return factor; });
    };
    if constexpr (Shape::kPairs) {
      add(second ? p.dk_sum : p.dv_sum, dv, second ? p.scale : 1.0f);
    } else {
      add(p.dk_sum, dk, p.scale);
      add(p.dv_sum, dv, 1.0f);
    }
  }
  __device__ __forceinline__ void write(const SoftmaxProblem& p, const SoftmaxHead& head, int first,
                                        bool second) const {
    const int rows = p.tokens - first;
    const auto store = [&](const HeadRows& to, const auto& x, float factor) {
      store_rows(head.row(to, first), to.stride, rows, p.head_dim, x, [&](int) { return factor; });
    };
    if constexpr (Shape::kPairs) {
      store(second ? p.dk : p.dv, dv, second ? p.scale : 1.0f);
    } else {
      store(p.dk, dk, p.scale);
      store(p.dv, dv, 1.0f);
    }
  }
  Accumulator<kRowBlocks, kD / 8> dk, dv;
};

// Adds what the queries of one head give to the gradients of the keys from `first` on, which have
// been loaded, or are being.
template <typename Shape, typename Policy, typename Tiles, typename Problem>
__device__ __forceinline__ void add_queries_of_head(SoftmaxKeyGradients<Shape>& gradients,
                                                    const Tiles& tiles, const Problem& p,
                                                    const SoftmaxHead& head, const Policy& policy,
                                                    int first, const float* delta_HT) {
  constexpr int kD = Shape::kD, kQueries = Shape::kQueries, kRowBlocks = Shape::kRowBlocks;
  using Gradients = SoftmaxKeyGradients<Shape>;
  const BlockThreads<Shape::kThreads> group;
  const int pair = group.warp() % Gradients::kGroups;
  const int warp_row = pair * 16 * kRowBlocks;
  const int warp_first = first + warp_row;  // keys of the warp
  const int warp_last = warp_first + 16 * kRowBlocks - 1;
  const Visibility visibility = visibility_of(p);
  typename Policy::template KeyRows<Shape> scores(policy, {head.index, first, warp_row});
  const auto load_queries = [&](int query, int stage) {
    load_rows<kQueries, kD>(group, tiles.q.at(stage), head, p.q, query);
    load_rows<kQueries, kD>(group, tiles.dout.at(stage), head, p.dout, query);
    load_values<kQueries>(group, tiles.values(stage), p, head, delta_HT, query);
    scores.load(group, tiles.policy(stage), query);
    cp_async_commit();
  };
  const int begin = kIsFar<Problem> ? 0 : first;
  load_queries(begin, 0);
  const int end = visibility.end_query(min(first + Shape::kKeys, p.tokens) - 1);
  const bool second = Shape::kPairs && group.warp() >= Gradients::kGroups;
  const typename Gradients::Rows k(second ? tiles.v : tiles.k, warp_row), v(tiles.v, warp_row);
  scores.begin_gradient(group, tiles.policy(2));
  for (int query = begin, stage = 0; query < end; query += kQueries, stage ^= 1) {
    cp_async_wait<0>();
    group.sync();
    if (query + kQueries < end) load_queries(query + kQueries, stage ^ 1);
    const QueryValues values = tiles.values(stage);
    const int lowest = first_key_of(visibility, query, values, 0);
    const int highest = first_key_of(visibility, query + kQueries - 1, values, kQueries - 1);
    if ((!kIsFar<Problem> && query + kQueries <= warp_first) || lowest > warp_last) continue;
    const bool masked = (!kIsFar<Problem> && query < warp_last) || highest > warp_first;
    scores.enter(tiles.policy(stage), query + distance_of(p));
    const auto to_p = [&](auto& s) {
      to_probabilities(s, warp_first, query, visibility, masked, values);
    };
    if constexpr (Shape::kPairs) {
      gradients.add_by_pair(scores, pair, second, tiles.exchanges, k, tiles.q.at(stage),
                            tiles.dout.at(stage), values, to_p);
    } else {
      gradients.add(scores, k, v, tiles.q.at(stage), tiles.dout.at(stage), values, to_p);
    }
  }
  scores.end_gradient(group);
}

// A block has a tile of keys of one head, and walks over the queries of one head of its group after
// the other. A kernel of its own computes heads that form no groups, in fewer registers.
template <typename Shape, typename Policy, bool kGrouped, typename Problem = SoftmaxProblem>
static __global__ __launch_bounds__(Shape::kThreads) void softmax_key_gradient_kernel(
    Problem p, const __grid_constant__ Policy policy, const float* delta_HT) {
  using Gradients = SoftmaxKeyGradients<Shape>;
  extern __shared__ __align__(128) unsigned char shared[];
  const SoftmaxKeyTiles<Shape, typename Policy::template KeyRows<Shape>> tiles(shared);
  const BlockThreads<Shape::kThreads> group;
  const auto key_index = static_cast<int>(blockIdx.y);
  const SoftmaxHead key_head(p, key_index, key_index);
  const int first = (static_cast<int>(blockIdx.x) + first_key_of(p) / Shape::kKeys) * Shape::kKeys;
  load_rows<Shape::kKeys, Shape::kD>(group, tiles.k, key_head, p.k, first);
  load_rows<Shape::kKeys, Shape::kD>(group, tiles.v, key_head, p.v, first);
  Gradients gradients;
  gradients.dk.clear();
  gradients.dv.clear();
  int n = 0;
#pragma unroll 1
  do {
    const SoftmaxHead head(p, kGrouped ? key_index * p.group + n : key_index, key_index);
    add_queries_of_head(gradients, tiles, p, head, policy, first, delta_HT);
    if (kGrouped) group.sync();  // they have been read, so those of the next head may come
  } while (kGrouped && ++n < p.group);
  const int pair = group.warp() % Gradients::kGroups;
  gradients.write(p, key_head, first + pair * 16 * Shape::kRowBlocks,
                  Shape::kPairs && group.warp() >= Gradients::kGroups);
}

}  // namespace sbtrain::kernels
