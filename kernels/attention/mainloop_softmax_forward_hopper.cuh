// Softmax attention forward for sm_90a: persistent and warp-specialised, as that of stick-breaking
// (mainloop_stickbreaking_forward_hopper.cuh). One warp loads; each of the other warpgroups, the
// consumers, owns 64 queries of a tile and walks over their blocks of keys from right to left.
// While it exponentiates the scores of one block, the product with the values of the block before
// is under way on the tensor cores. So o is rescaled only after that (FlashAttention-3, arXiv
// 2407.08608, section 3.2).
#pragma once

#include "kernels/attention/mainloop_softmax_forward.cuh"
#include "kernels/attention/products_hopper.cuh"
#include "kernels/attention/softmax_tiles_hopper.cuh"

namespace sbtrain::kernels {

template <int kHeadDim, typename Policy>
using HopperSoftmaxForwardShape = HopperSoftmaxShape<kHeadDim, 128, kHeadDim <= 64 ? 4 : 2, Policy>;

template <typename Shape>
struct HopperSoftmaxForwardShared {
  static constexpr int kD = Shape::kD, kKeys = Shape::kKeys, kStages = Shape::kStages;
  alignas(1024) __nv_bfloat16 q[Shape::kQueries * kD];
  alignas(1024) __nv_bfloat16 k[kStages][kKeys * kD];
  alignas(1024) __nv_bfloat16 v[kStages][kKeys * kD];
  alignas(16) unsigned char staged[kStages][Shape::kStaged ? Shape::Scores::stage_bytes() : 16];
  Pipeline<1> queries, tiles;
  Pipeline<kStages> keys, values;
  QueryTile tile;

  __device__ __forceinline__ void init() {
    queries.init(1, kReaders<Shape>);
    tiles.init(1, kReaders<Shape>);
    keys.init(1, kReaders<Shape>);
    values.init(Shape::kStaged ? 1 + 32 : 1, kReaders<Shape>);
  }
};

// ---- The warp that loads ------------------------------------------------------------------------

template <typename Shape, typename Policy>
class HopperSoftmaxForwardProducer : public TileState {
  static constexpr int kD = Shape::kD, kKeys = Shape::kKeys;
  static constexpr int kTileBytes = 2 * kKeys * kD;
  using Scores = typename Shape::Scores;
  using Shared = HopperSoftmaxForwardShared<Shape>;
  using Arguments = HopperSoftmaxArguments<Policy>;

 public:
  __device__ __forceinline__ HopperSoftmaxForwardProducer(Shared& shared, const Arguments& x)
      : s_(shared), x_(x) {}

  __device__ __forceinline__ QueryTile tile_of(int tile, int head) const {
    return tile_of_queries<Shape::kQueries, kKeys>(x_.p, tile * Shape::kQueries, head);
  }
  __device__ __forceinline__ void load(const QueryTile& tile) {
    Scores scores(x_.policy, {tile.head, tile.first, 0});
    for (int block = tile.last; block >= tile.begin; block -= kKeys) {
      load_keys(tile, block);
      if (block == tile.last) load_queries(tile);
      load_values(scores, tile, block);
      state_.advance();
    }
  }

 private:
  __device__ __forceinline__ void load_keys(const QueryTile& tile, int block) {
    Mbarrier& full = s_.keys.acquire(state_);
    if (lane() != 0) return;
    full.arrive_and_expect(kTileBytes);
    load_token_tile<kKeys, kD>(s_.k[state_.stage()], x_.k, full, block, tile.head / x_.p.group);
  }
  __device__ __forceinline__ void load_queries(const QueryTile& tile) {
    Mbarrier& full = s_.queries.acquire(tile_state());
    if (lane() != 0) return;
    full.arrive_and_expect(2 * Shape::kQueries * kD);
    load_token_tile<Shape::kQueries, kD>(s_.q, x_.q, full, tile.first, tile.head);
  }
  __device__ __forceinline__ void load_values(Scores& scores, const QueryTile& tile, int block) {
    const int stage = state_.stage();
    Mbarrier& full = s_.values.acquire(state_);
    if constexpr (Shape::kStaged) {
      scores.load(BlockThreads<32>(), s_.staged[stage], block);
      full.arrive_after_copies();
    }
    if (lane() != 0) return;
    full.arrive_and_expect(kTileBytes);
    load_token_tile<kKeys, kD>(s_.v[stage], x_.v, full, block, tile.head / x_.p.group);
  }

  Shared& s_;
  const Arguments& x_;
  PipelineState<Shape::kStages> state_;
};

// ---- The warpgroups that compute ----------------------------------------------------------------

template <typename Shape, typename Policy>
class HopperSoftmaxForwardConsumer : public TileState {
  static constexpr int kD = Shape::kD, kKeys = Shape::kKeys;
  using Scores = typename Shape::Scores;
  using Shared = HopperSoftmaxForwardShared<Shape>;
  using Arguments = HopperSoftmaxArguments<Policy>;
  using Tile = WarpgroupAccumulator<kKeys>;
  static constexpr bool kFar = kIsFar<ProblemOf<Policy>>;

 public:
  __device__ __forceinline__ HopperSoftmaxForwardConsumer(Shared& shared, const Arguments& x,
                                                          int index)
      : s_(shared), x_(x), index_(index) {}

  __device__ __forceinline__ void compute(const QueryTile& tile) {
    const auto& p = x_.p;
    const int warp = uniform(static_cast<int>(threadIdx.x) / 32) % 4;
    const int warp_row = 64 * index_ + 16 * warp;
    const int first = tile.first + warp_row;
    const QueryTile mine = tile_of_queries<64, kKeys>(p, tile.first + 64 * index_, tile.head);
    const int begin = uniform(mine.begin), last = uniform(mine.last);
    for (int block = tile.last; block > last; block -= kKeys) pass_over();
    State x;
    x.o.clear();
    Tile s;
    s_.queries.wait(tile_state());
    issue_scores<Shape>(s_, k_, 64 * index_, s);
    Scores scores(x_.policy, {tile.head, tile.first, warp_row});
    const TileRowKeys seen(visibility_of(p), first);
    wait_for_products<0>();
    s.pin();
    s_.keys.release_and_advance(k_);
    for (int block = last;; block -= kKeys) {
      exponentiate(x, s, scores, seen, block);
      wait_for_products<0>();
      take_operand(x, s);
      if (block <= begin) break;
      issue_scores<Shape>(s_, k_, 64 * index_, s);
      issue_output<Shape>(s_, v_, x.o, x.a);
      wait_for_products<1>();
      s.pin();
      s_.keys.release_and_advance(k_);
    }
    s_.queries.release();
    issue_output<Shape>(s_, v_, x.o, x.a);
    wait_for_products<0>();
    x.o.pin();
    x.a.pin();
    s_.values.release_and_advance(v_);
    for (int block = begin; block > tile.begin; block -= kKeys) pass_over();
    if constexpr (kFar) {
      merge_softmax<1>(p, SoftmaxHead(p, tile.head), first, x.o, x.softmax);
    } else {
      write_softmax<1>(p, SoftmaxHead(p, tile.head), first, x.o, x.softmax);
    }
  }

 private:
  struct State {
    RunningSoftmax<1> softmax;
    WarpgroupAccumulator<kD> o;
    WarpgroupOperand<kKeys> a;  // of the product with values that is under way
    float factor[2] = {1.0f, 1.0f};
    bool raised = false;          // the rows of o have to be multiplied by the factor
    bool values_pending = false;  // the product is under way
  };

  // Leaves out a block that only other consumers' queries see.
  __device__ __forceinline__ void pass_over() {
    s_.keys.wait(k_);
    s_.keys.release_and_advance(k_);
    s_.values.wait(v_);
    s_.values.release_and_advance(v_);
    staged_.advance();
  }

  // Products of queries and keys become probabilities, relative to the maxima so far.
  __device__ __forceinline__ void exponentiate(State& x, Tile& s, Scores& scores,
                                               const TileRowKeys& seen, int block) {
    const void* staged = nullptr;
    if constexpr (Shape::kStaged) {  // it comes with the values
      s_.values.wait(staged_);
      staged = s_.staged[staged_.stage()];
      staged_.advance();
    }
    scores.enter(staged, block - distance_of(x_.p));
    scores.score(s);
    mask<kFar>(s, seen, block, -INFINITY);
    x.raised = x.softmax.raise(s, x.factor);
    x.softmax.exponentiate(s);
  }
  // The probabilities become the operand, after the product that had it before.
  __device__ __forceinline__ void take_operand(State& x, const Tile& s) {
    x.o.pin();
    x.a.pin();
    if (x.values_pending) s_.values.release_and_advance(v_);
    x.values_pending = true;
    if (x.raised) RunningSoftmax<1>::rescale(x.factor, x.o);
    round_to_operand(x.a, s);
  }
  Shared& s_;
  const Arguments& x_;
  const int index_;
  PipelineState<Shape::kStages> k_, v_, staged_;
};

// ---- The main loop ------------------------------------------------------------------------------

template <typename Tiles, typename Policy>
struct SoftmaxForwardMainloop {
  using Shape = Tiles;
  using Arguments = HopperSoftmaxArguments<Policy>;
  using Shared = HopperSoftmaxForwardShared<Shape>;
  using Producer = HopperSoftmaxForwardProducer<Shape, Policy>;
  using Consumer = HopperSoftmaxForwardConsumer<Shape, Policy>;
  static constexpr int kTileRows = Shape::kQueries;
  static SoftmaxQuerySteps<Shape::kQueries, Shape::kKeys, ProblemOf<Policy>> steps(
      const ProblemOf<Policy>& p) {
    return {p};
  }
};

}  // namespace sbtrain::kernels
