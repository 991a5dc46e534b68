// Phase 2 of the softmax backward pass for sm_90a: dk and dv, and the gradients of what the score
// function learns. Each consumer owns 64 keys of a tile and walks over the tiles of queries that
// see them, of one head of the group after the other; where scores depend on the head, groups have
// one. Keys are the rows of its scores: P^T and dS^T thus are left operands of dv and dk without
// leaving the registers (FlashAttention-3, arXiv 2407.08608).
#pragma once

#include <algorithm>

#include "kernels/attention/mainloop_softmax_backward.cuh"
#include "kernels/attention/softmax_tiles_hopper.cuh"

namespace sbtrain::kernels {

template <int kHeadDim, int kTileQueries>
struct HopperSoftmaxKeyTiles {
  static constexpr int kD = kHeadDim;
  static constexpr int kRowBlocks = 1;  // of 16 keys, each warp
  static constexpr int kConsumers = 2;
  static constexpr int kWarps = 4 * kConsumers;
  static constexpr int kRows = 64;  // keys of a consumer
  static constexpr int kKeys = kRows * kConsumers;
  static constexpr int kQueries = kTileQueries;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kStages = 4;
};
// Whether the score function learns something, whose gradient takes registers.
template <typename Policy>
constexpr bool learns() {
  using Scores = typename Policy::template KeyRows<HopperSoftmaxKeyTiles<64, 64>>;
  return Scores::shared_bytes() > 0;
}
// Then heads of 128 channels leave registers for no more than 32 queries, and those of 32 need them
// for what the compiler makes of more.
template <int kHeadDim, typename Policy>
using HopperSoftmaxKeyTilesOf =
    HopperSoftmaxKeyTiles<kHeadDim, (kHeadDim != 64 && learns<Policy>()) ? 32 : 64>;

template <int kHeadDim, typename Policy>
struct HopperSoftmaxKeyShape : HopperSoftmaxKeyTilesOf<kHeadDim, Policy> {
  using Tiles = HopperSoftmaxKeyTilesOf<kHeadDim, Policy>;
  using Scores = typename Policy::template KeyRows<Tiles>;
  // dP of the next tile is computed together with its scores, if there are registers for that.
  static constexpr bool kAhead = Tiles::kD <= 64;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;
};

template <typename Shape>
struct HopperSoftmaxKeyShared {
  static constexpr int kD = Shape::kD, kStages = Shape::kStages, kConsumers = Shape::kConsumers;
  static constexpr int kQueries = Shape::kQueries;
  // At least 16 bytes, so that no array is empty.
  static constexpr int kStagedBytes = std::max(16, Shape::Scores::stage_bytes());
  static constexpr int kGradientBytes = std::max(16, Shape::Scores::shared_bytes());
  alignas(1024) __nv_bfloat16 k[kConsumers][Shape::kRows * kD];
  alignas(1024) __nv_bfloat16 v[kConsumers][Shape::kRows * kD];
  alignas(1024) __nv_bfloat16 q[kStages][kQueries * kD];
  alignas(1024) __nv_bfloat16 dout[kStages][kQueries * kD];
  alignas(16) unsigned char staged[kStages][kStagedBytes];
  alignas(16) unsigned char gradient[kGradientBytes];
  alignas(16) float lse[kStages][kQueries];
  alignas(16) float delta[kStages][kQueries];
  alignas(16) int position[kStages][kQueries];
  int first_query[kStages];  // < 0: there are no more queries for this tile
  Pipeline<1> keys, tiles;
  Pipeline<kStages> queries;
  KeyTile tile;

  __device__ __forceinline__ QueryValues values(int stage) {
    return {lse[stage], delta[stage], position[stage]};
  }
  __device__ __forceinline__ void init() {
    keys.init(1, kReaders<Shape>);
    tiles.init(1, kReaders<Shape>);
    queries.init(1 + 32, kReaders<Shape>);
  }
};

// ---- The warp that loads ------------------------------------------------------------------------

template <typename Shape, typename Policy>
class HopperSoftmaxKeyProducer : public TileState {
  static constexpr int kD = Shape::kD, kQueries = Shape::kQueries;
  using Scores = typename Shape::Scores;
  using Shared = HopperSoftmaxKeyShared<Shape>;
  using Arguments = HopperSoftmaxArguments<Policy>;

 public:
  __device__ __forceinline__ HopperSoftmaxKeyProducer(Shared& shared, const Arguments& x)
      : s_(shared), x_(x) {}

  __device__ __forceinline__ KeyTile tile_of(int tile, int head) const {
    return {(first_key_of(x_.p) / Shape::kKeys + tile) * Shape::kKeys, head};
  }
  __device__ __forceinline__ void load(const KeyTile& tile) {
    const int first = tile.first, group = Policy::kOfHead ? 1 : x_.p.group;
    const int end = end_query_of_keys<Shape::kKeys>(x_.p, first);
    Scores scores(x_.policy, {tile.head, first, 0});
    load_keys(first, tile.head);
    for (int head = tile.head * group; head < (tile.head + 1) * group; ++head) {
      const int begin = kIsFar<ProblemOf<Policy>> ? 0 : first;
      for (int query = begin; query < end; query += kQueries) load_queries(scores, query, head);
    }
    load_queries(scores, -1, tile.head);
  }

 private:
  __device__ __forceinline__ void load_keys(int first, int head) {
    Mbarrier& full = s_.keys.acquire(tile_state());
    if (lane() != 0) return;
    full.arrive_and_expect(2 * 2 * Shape::kKeys * kD);
    for (int i = 0; i < Shape::kConsumers; ++i) {
      const int key = first + i * Shape::kRows;
      load_token_tile<Shape::kRows, kD>(s_.k[i], x_.k, full, key, head);
      load_token_tile<Shape::kRows, kD>(s_.v[i], x_.v, full, key, head);
    }
  }
  // With first = -1, says that there are no more.
  __device__ __forceinline__ void load_queries(Scores& scores, int first, int head) {
    const int stage = state_.stage();
    Mbarrier& full = s_.queries.acquire(state_);
    if (first >= 0) {
      load_values<kQueries>(BlockThreads<32>(), s_.values(stage), x_.p, SoftmaxHead(x_.p, head),
                            x_.delta_HT, first);
      scores.load(BlockThreads<32>(), s_.staged[stage], first);
    }
    full.arrive_after_copies();
    if (lane() == 0) {
      s_.first_query[stage] = first;
      if (first < 0) {
        full.arrive();
      } else {
        full.arrive_and_expect(2 * 2 * kQueries * kD);
        load_token_tile<kQueries, kD>(s_.q[stage], x_.q, full, first, head);
        load_token_tile<kQueries, kD>(s_.dout[stage], x_.dout, full, first, head);
      }
    }
    state_.advance();
  }

  Shared& s_;
  const Arguments& x_;
  PipelineState<Shape::kStages> state_;
};

// ---- The warpgroups that compute ----------------------------------------------------------------

template <typename Shape, typename Policy>
class HopperSoftmaxKeyConsumer : public TileState {
  static constexpr int kD = Shape::kD, kQueries = Shape::kQueries;
  using Scores = typename Shape::Scores;
  using Shared = HopperSoftmaxKeyShared<Shape>;
  using Arguments = HopperSoftmaxArguments<Policy>;
  using Tile = WarpgroupAccumulator<kQueries>;
  using Operand = WarpgroupOperand<kQueries>;
  using Gradient = WarpgroupAccumulator<kD>;
  using Keys = TileOperand<Shape::kRows, kD, TileUse::kRows>;
  using Queries = TileOperand<kQueries, kD, TileUse::kRows>;
  static constexpr bool kFar = kIsFar<ProblemOf<Policy>>;

 public:
  __device__ __forceinline__ HopperSoftmaxKeyConsumer(Shared& shared, const Arguments& x, int index)
      : s_(shared), x_(x), index_(index) {}

  __device__ __forceinline__ void compute(const KeyTile& tile) {
    const auto& p = x_.p;
    const int warp = uniform(static_cast<int>(threadIdx.x) / 32) % 4;
    const int warp_row = Shape::kRows * index_ + 16 * warp;
    first_ = tile.first + Shape::kRows * index_;
    warp_first_ = tile.first + warp_row;
    Scores scores(x_.policy, {tile.head, tile.first, warp_row});
    const NamedThreads<128 * Shape::kConsumers> consumers{1, 128};  // of the block
    scores.begin_gradient(consumers, s_.gradient);
    Gradient dk, dv;
    dk.clear();
    dv.clear();
    s_.keys.wait(tile_state());
    walk(scores, dk, dv);
    s_.keys.release();
    scores.end_gradient(consumers);
    if constexpr (Scores::shared_bytes() > 0) consumers.sync();  // the next tile may use it
    const SoftmaxHead head(p, tile.head);
    const float scale = p.scale;
    const int rows = p.tokens - warp_first_;
    const auto scaled = [scale](int) { return scale; };
    const auto whole = [](int) { return 1.0f; };
    if constexpr (kFar) {
      add_rows(sum_row(head, p.dk_sum, warp_first_), p.dk_sum.stride, rows, p.head_dim, dk, scaled);
      add_rows(sum_row(head, p.dv_sum, warp_first_), p.dv_sum.stride, rows, p.head_dim, dv, whole);
    } else {
      store_rows(head.row(p.dk, warp_first_), p.dk.stride, rows, p.head_dim, dk, scaled);
      store_rows(head.row(p.dv, warp_first_), p.dv.stride, rows, p.head_dim, dv, whole);
    }
  }

 private:
  // Walks over the tiles of queries that see a key of this consumer until there are no more, one
  // run of neighbouring tiles after the other. Between runs the consumer holds no stage, however
  // many it passes over: the producer has to fill them all, for other consumers, and needs every
  // buffer for that.
  __device__ __forceinline__ void walk(Scores& scores, Gradient& dk, Gradient& dv) {
    for (;;) {
      const int stage = next_stage();
      if (stage < 0) return;
      walk_over_run(scores, dk, dv, stage);
    }
  }

  // The products with P^T and dS^T of a tile of queries are under way while the scores of the next
  // one become P^T. The stage before `stage` is released when they are complete.
  __device__ __forceinline__ void walk_over_run(Scores& scores, Gradient& dk, Gradient& dv,
                                                int stage) {
    Tile s, dp;
    Operand p, ds;
    int before = -1;
    issue_scores(s, dp, stage);
    wait_for_products<0>();
    for (;;) {
      s.pin();
      if constexpr (Shape::kAhead) dp.pin();
      to_probabilities(scores, s, stage);
      if constexpr (Shape::kAhead) to_gradients(scores, s, dp, stage);
      wait_for_products<0>();
      dk.pin();
      dv.pin();
      p.pin();
      ds.pin();
      if (before >= 0) s_.queries.release(before);
      if constexpr (!Shape::kAhead) {
        issue_product_of_values(dp, stage);
        wait_for_products<0>();
        dp.pin();
        to_gradients(scores, s, dp, stage);
      }
      round_to_operand(p, s);
      round_to_operand(ds, dp);
      before = stage;
      stage = stage_if_seen();
      if (stage < 0) {
        issue_gradients(dk, dv, p, ds, before);
        break;
      }
      issue_scores(s, dp, stage);
      issue_gradients(dk, dv, p, ds, before);
      wait_for_products<1>();
    }
    wait_for_products<0>();
    dk.pin();
    dv.pin();
    p.pin();
    ds.pin();
    s_.queries.release(before);
  }

  // Waits for the next tile of queries and returns its stage if they see a key of this consumer; -1
  // if not, or if there are no more. Then the tile is still the next one.
  __device__ __forceinline__ int stage_if_seen() {
    const int stage = uniform(state_.stage());
    s_.queries.full[stage].wait(state_.parity());
    const int query = uniform(s_.first_query[stage]);
    if (query < 0) return -1;
    const int lowest = uniform(first_key_of(visibility_of(x_.p), query, s_.values(stage), 0));
    if ((!kFar && query + kQueries <= first_) || lowest >= first_ + Shape::kRows) return -1;
    state_.advance();
    return stage;
  }
  // The same of the first tile from the next one on that sees a key; passes over the others.
  __device__ __forceinline__ int next_stage() {
    for (;;) {
      const int stage = stage_if_seen();
      if (stage >= 0) return stage;
      const int passed = uniform(state_.stage());
      const bool end = uniform(s_.first_query[passed]) < 0;
      s_.queries.release(passed);
      state_.advance();
      if (end) return -1;
    }
  }

  // The scores become P^T.
  __device__ __forceinline__ void to_probabilities(Scores& scores, Tile& s, int stage) {
    const Visibility seen = visibility_of(x_.p);
    const int query = uniform(s_.first_query[stage]);
    bool masked;
    if constexpr (kFar) {
      masked = seen.end_query(warp_first_) < query + kQueries;
    } else {
      const int highest = seen.first_key(query + kQueries - 1, s_.position[stage][kQueries - 1]);
      masked = uniform(query < warp_first_ + 15 || highest > warp_first_);
    }
    scores.enter(s_.staged[stage], query + distance_of(x_.p));
    scores.score(s);
    kernels::to_probabilities(s, warp_first_, query, seen, masked, s_.values(stage));
  }
  // dp, the products of values and do, becomes dS^T = P^T (dp - delta).
  __device__ __forceinline__ void to_gradients(Scores& scores, const Tile& s, Tile& dp, int stage) {
    kernels::to_gradients(dp, s_.values(stage), [&](int r, int c) {
      const float(&x)[4] = s.at[r][c];
      return make_float4(x[0], x[1], x[2], x[3]);
    });
    scores.add_gradient(dp);
  }

  // s = k q^T and, if there are registers for it, dp = v do^T.
  __device__ __forceinline__ void issue_scores(Tile& s, Tile& dp, int stage) {
    s.pin();
    if constexpr (Shape::kAhead) dp.pin();
    wgmma_fence();
    issue_product<kD>(s, Keys(s_.k[index_]), Queries(s_.q[stage]));
    if constexpr (Shape::kAhead) issue_product<kD>(dp, Keys(s_.v[index_]), Queries(s_.dout[stage]));
    wgmma_commit();
  }
  __device__ __forceinline__ void issue_product_of_values(Tile& dp, int stage) {
    dp.pin();
    wgmma_fence();
    issue_product<kD>(dp, Keys(s_.v[index_]), Queries(s_.dout[stage]));
    wgmma_commit();
  }
  // dv += P^T do and dk += dS^T q.
  __device__ __forceinline__ void issue_gradients(Gradient& dk, Gradient& dv, Operand& p,
                                                  Operand& ds, int stage) {
    using Columns = TileOperand<kQueries, kD, TileUse::kColumns>;
    p.pin();
    ds.pin();
    dk.pin();
    dv.pin();
    wgmma_fence();
    issue_product<kQueries>(dv, p, Columns(s_.dout[stage]));
    issue_product<kQueries>(dk, ds, Columns(s_.q[stage]));
    wgmma_commit();
  }

  Shared& s_;
  const Arguments& x_;
  const int index_;
  int first_ = 0, warp_first_ = 0;  // keys of the consumer, of the warp
  PipelineState<Shape::kStages> state_;
};

// ---- The main loop ------------------------------------------------------------------------------

template <typename Tiles, typename Policy>
struct SoftmaxKeyGradientMainloop {
  using Shape = Tiles;
  using Arguments = HopperSoftmaxArguments<Policy>;
  using Shared = HopperSoftmaxKeyShared<Shape>;
  using Producer = HopperSoftmaxKeyProducer<Shape, Policy>;
  using Consumer = HopperSoftmaxKeyConsumer<Shape, Policy>;
  static constexpr int kTileRows = Shape::kKeys;
  static SoftmaxKeySteps<Shape::kKeys, Shape::kQueries, ProblemOf<Policy>> steps(
      const ProblemOf<Policy>& p) {
    return {p};
  }
};

}  // namespace sbtrain::kernels
