// Phase 1 of the softmax backward pass for sm_90a: dq, as mainloop_softmax_backward.cuh says, with
// the correction of delta where the score function asks for it. Each consumer owns 64 queries of a
// tile and walks over their blocks of keys from left to right; the structure is that of
// mainloop_stickbreaking_query_gradient_hopper.cuh.
#pragma once

#include "kernels/attention/mainloop_softmax_backward.cuh"
#include "kernels/attention/products_hopper.cuh"
#include "kernels/attention/softmax_tiles_hopper.cuh"

namespace sbtrain::kernels {

template <int kHeadDim, typename Policy>
using HopperSoftmaxQueryShape = HopperSoftmaxShape<kHeadDim, 64, 4, Policy>;

template <typename Shape>
struct HopperSoftmaxQueryShared {
  static constexpr int kD = Shape::kD, kKeys = Shape::kKeys, kStages = Shape::kStages;
  alignas(1024) __nv_bfloat16 q[Shape::kQueries * kD];
  alignas(1024) __nv_bfloat16 dout[Shape::kQueries * kD];
  alignas(1024) __nv_bfloat16 k[kStages][kKeys * kD];
  alignas(1024) __nv_bfloat16 v[kStages][kKeys * kD];
  alignas(16) unsigned char staged[kStages][Shape::kStaged ? Shape::Scores::stage_bytes() : 16];
  Pipeline<1> queries, tiles;
  Pipeline<kStages> keys, values;
  QueryTile tile;

  __device__ __forceinline__ void init() {
    queries.init(1, kReaders<Shape>);
    tiles.init(1, kReaders<Shape>);
    keys.init(Shape::kStaged ? 1 + 32 : 1, kReaders<Shape>);
    values.init(1, kReaders<Shape>);
  }
};

// ---- The warp that loads ------------------------------------------------------------------------

template <typename Shape, typename Policy>
class HopperSoftmaxQueryProducer : public TileState {
  static constexpr int kD = Shape::kD, kKeys = Shape::kKeys;
  static constexpr int kTileBytes = 2 * kKeys * kD;
  using Scores = typename Shape::Scores;
  using Shared = HopperSoftmaxQueryShared<Shape>;
  using Arguments = HopperSoftmaxArguments<Policy>;

 public:
  __device__ __forceinline__ HopperSoftmaxQueryProducer(Shared& shared, const Arguments& x)
      : s_(shared), x_(x) {}

  __device__ __forceinline__ QueryTile tile_of(int tile, int head) const {
    return tile_of_queries<Shape::kQueries, kKeys>(x_.p, tile * Shape::kQueries, head);
  }
  __device__ __forceinline__ void load(const QueryTile& tile) {
    Scores scores(x_.policy, {tile.head, tile.first, 0});
    for (int block = tile.begin; block <= tile.last; block += kKeys) {
      load_keys(scores, tile, block);
      if (block == tile.begin) load_queries(tile);
      load_values(tile, block);
      state_.advance();
    }
  }

 private:
  // The numbers of the score function come with the keys.
  __device__ __forceinline__ void load_keys(Scores& scores, const QueryTile& tile, int block) {
    const int stage = state_.stage();
    Mbarrier& full = s_.keys.acquire(state_);
    if constexpr (Shape::kStaged) {
      scores.load(BlockThreads<32>(), s_.staged[stage], block);
      full.arrive_after_copies();
    }
    if (lane() != 0) return;
    full.arrive_and_expect(kTileBytes);
    load_token_tile<kKeys, kD>(s_.k[stage], x_.k, full, block, tile.head / x_.p.group);
  }
  __device__ __forceinline__ void load_queries(const QueryTile& tile) {
    Mbarrier& full = s_.queries.acquire(tile_state());
    if (lane() != 0) return;
    full.arrive_and_expect(2 * 2 * Shape::kQueries * kD);
    load_token_tile<Shape::kQueries, kD>(s_.q, x_.q, full, tile.first, tile.head);
    load_token_tile<Shape::kQueries, kD>(s_.dout, x_.dout, full, tile.first, tile.head);
  }
  __device__ __forceinline__ void load_values(const QueryTile& tile, int block) {
    Mbarrier& full = s_.values.acquire(state_);
    if (lane() != 0) return;
    full.arrive_and_expect(kTileBytes);
    load_token_tile<kKeys, kD>(s_.v[state_.stage()], x_.v, full, block, tile.head / x_.p.group);
  }

  Shared& s_;
  const Arguments& x_;
  PipelineState<Shape::kStages> state_;
};

// ---- The warpgroups that compute ----------------------------------------------------------------

template <typename Shape, typename Policy>
class HopperSoftmaxQueryConsumer : public TileState {
  static constexpr int kD = Shape::kD, kKeys = Shape::kKeys;
  using Scores = typename Shape::Scores;
  using Shared = HopperSoftmaxQueryShared<Shape>;
  using Arguments = HopperSoftmaxArguments<Policy>;
  using Tile = WarpgroupAccumulator<kKeys>;
  static constexpr bool kFar = kIsFar<ProblemOf<Policy>>;

 public:
  __device__ __forceinline__ HopperSoftmaxQueryConsumer(Shared& shared, const Arguments& x,
                                                        int index)
      : s_(shared), x_(x), index_(index) {}

  __device__ __forceinline__ void compute(const QueryTile& tile) {
    const auto& p = x_.p;
    const SoftmaxHead head(p, tile.head);
    const int warp = uniform(static_cast<int>(threadIdx.x) / 32) % 4;
    const int warp_row = 64 * index_ + 16 * warp;
    const int first = tile.first + warp_row;
    const QueryTile mine = tile_of_queries<64, kKeys>(p, tile.first + 64 * index_, tile.head);
    const int begin = uniform(mine.begin), last = uniform(mine.last);
    for (int block = tile.begin; block < begin; block += kKeys) pass_over();
    Tile s, dp;
    WarpgroupAccumulator<kD> dq;
    WarpgroupOperand<kKeys> ds;
    dq.clear();
    s_.queries.wait(tile_state());
    issue_scores<Shape>(s_, scored_, 64 * index_, s, dp);
    const TileRowKeys seen(visibility_of(p), first);
    Rows rows = enter_rows(head, first);
    Scores scores(x_.policy, {tile.head, tile.first, warp_row});
    wait_for_products<0>();
    s.pin();
    dp.pin();
    s_.values.release_and_advance(scored_);
    for (int block = begin;; block += kKeys) {
      to_gradients(s, dp, scores, rows, seen, block);
      wait_for_products<0>();
      dq.pin();
      ds.pin();
      if (block > begin) s_.keys.release_and_advance(released_);
      round_to_operand(ds, dp);
      if (block >= last) break;
      issue_scores<Shape>(s_, scored_, 64 * index_, s, dp);
      issue_query_gradient<Shape>(s_, released_, dq, ds);
      wait_for_products<1>();
      s.pin();
      dp.pin();
      s_.values.release_and_advance(scored_);
    }
    s_.queries.release();
    issue_query_gradient<Shape>(s_, released_, dq, ds);
    if constexpr (Policy::kExactDelta) correct(head, first, rows);
    wait_for_products<0>();
    dq.pin();
    ds.pin();
    s_.keys.release_and_advance(released_);
    for (int block = last; block < tile.last; block += kKeys) pass_over();
    const float scale = p.scale;
    const auto scaled = [scale](int) { return scale; };
    if constexpr (kFar) {
      add_rows(sum_row(head, p.dq_sum, first), p.dq_sum.stride, p.queries - first, p.head_dim, dq,
               scaled);
    } else {
      store_rows(head.row(p.dq, first), p.dq.stride, p.tokens - first, p.head_dim, dq, scaled);
    }
  }

 private:
  // What is known of the lane's two rows.
  struct Rows {
    float lse_log2[2], delta[2];
    float residual[2] = {0.0f, 0.0f};  // sums of the rows of dS
  };

  // Leaves out a block that only other consumers' queries see.
  __device__ __forceinline__ void pass_over() {
    s_.keys.wait(scored_);
    s_.values.wait(scored_);
    s_.values.release_and_advance(scored_);
    s_.keys.release_and_advance(released_);
    staged_.advance();
  }

  __device__ __forceinline__ Rows enter_rows(const SoftmaxHead& head, int first) const {
    const SoftmaxProblem& p = x_.p;
    Rows rows;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first + lane_row() + 8 * i;
      const int64_t at = head.at(min(row, p.tokens - 1));
      rows.lse_log2[i] = row < p.tokens ? p.lse[at] * kLog2e : INFINITY;  // beyond: P = 0
      rows.delta[i] = x_.delta_HT[at];
    }
    return rows;
  }
  // delta += the sums of the rows of dS, which would be 0 without rounding.
  __device__ __forceinline__ void correct(const SoftmaxHead& head, int first,
                                          const Rows& rows) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first + lane_row() + 8 * i;
      const float exact = rows.delta[i] + quad_sum(rows.residual[i]);
      if (quad_lane() == 0 && row < x_.p.tokens) x_.delta_HT[head.at(row)] = exact;
    }
  }

  // dp becomes dS = P (dp - delta), with P from the scores. Masks come after the exponential, so
  // that the score's last product and the difference with lse are one instruction.
  __device__ __forceinline__ void to_gradients(Tile& s, Tile& dp, Scores& scores, Rows& rows,
                                               const TileRowKeys& seen, int block) {
    const void* staged = nullptr;
    if constexpr (Shape::kStaged) {
      staged = s_.staged[staged_.stage()];
      staged_.advance();
    }
    scores.enter(staged, block - distance_of(x_.p));
    scores.score(s);
    s.for_each([&](float& x, auto at) { x = exp2_ftz(x - rows.lse_log2[at.lane_row]); });
    mask<kFar>(s, seen, block, 0.0f);
#pragma unroll
    for (int c = 0; c < kKeys / 8; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = dp.at[0][c][i];
        x = s.at[0][c][i] * (x - rows.delta[i / 2]);
        if constexpr (Policy::kExactDelta) rows.residual[i / 2] += x;
      }
    }
  }

  Shared& s_;
  const Arguments& x_;
  const int index_;
  PipelineState<Shape::kStages> scored_, released_, staged_;
};

// ---- The main loop ------------------------------------------------------------------------------

template <typename Tiles, typename Policy>
struct SoftmaxQueryGradientMainloop {
  using Shape = Tiles;
  using Arguments = HopperSoftmaxArguments<Policy>;
  using Shared = HopperSoftmaxQueryShared<Shape>;
  using Producer = HopperSoftmaxQueryProducer<Shape, Policy>;
  using Consumer = HopperSoftmaxQueryConsumer<Shape, Policy>;
  static constexpr int kTileRows = Shape::kQueries;
  static SoftmaxQuerySteps<Shape::kQueries, Shape::kKeys, ProblemOf<Policy>> steps(
      const ProblemOf<Policy>& p) {
    return {p};
  }
};

}  // namespace sbtrain::kernels
