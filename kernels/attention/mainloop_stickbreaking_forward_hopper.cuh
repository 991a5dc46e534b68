// Stick-breaking attention forward for sm_90a: persistent and warp-specialised. One warp loads;
// each of the other warpgroups, the consumers, owns 64 queries of a tile and walks over their
// blocks of keys from right to left, like the portable loop (mainloop_stickbreaking_forward.cuh).
// While it breaks sticks over one block, the product with the values of the block before is under
// way on the tensor cores. To issue the scores of the next block by then would take 64 more
// registers, which measured slower.
#pragma once

#include "kernels/attention/mainloop_stickbreaking_forward.cuh"
#include "kernels/attention/products_hopper.cuh"
#include "kernels/attention/stickbreaking_tiles_hopper.cuh"

namespace sbtrain::kernels {

// With kFewTiles, for packs so short that each tile has a multiprocessor of its own in any case,
// tiles are as small as can be: they are done sooner.
template <int kHeadDim, bool kHasGates, bool kFewTiles = false>
struct HopperForwardShape {
  static constexpr int kD = kHeadDim;
  static constexpr bool kGated = kHasGates;
  static constexpr bool kFolded = false;
  static constexpr bool kFar = false;
  static constexpr int kKeys = 128;
  // Heads of 32 channels leave registers for a third one.
  static constexpr int kConsumers = kFewTiles ? 1 : kD <= 32 && !kGated ? 3 : 2;
  static constexpr int kQueries = 64 * kConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kStages = kKeys * kD <= 128 * 64 ? 4 : 2;
  static constexpr int kProducerRegisters = kGated ? 40 : 24;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : kGated ? 232 : 240;
};

struct HopperForwardArguments {
  StickBreakingProblem p;
  TileScheduler scheduler;
  CUtensorMap q, k, v;
};

template <typename Shape>
struct HopperForwardShared {
  static constexpr int kD = Shape::kD, kKeys = Shape::kKeys, kStages = Shape::kStages;
  static constexpr bool kGated = Shape::kGated;
  alignas(1024) __nv_bfloat16 q[Shape::kQueries * kD];
  alignas(1024) __nv_bfloat16 k[kStages][kKeys * kD];
  alignas(1024) __nv_bfloat16 v[kStages][kKeys * kD];
  ForwardGates<kKeys> gates[kGated ? kStages : 1];
  Pipeline<1> queries, tiles;
  Pipeline<kStages> keys, values;
  QueryTile tile;
  bool ends[kStages];              // the stage holds no keys: all sticks of the tile are used up
  int used_up[Shape::kConsumers];  // the last tile in which the consumer's sticks were, from 1

  __device__ __forceinline__ void init() {
    queries.init(1, kReaders<Shape>);
    tiles.init(1, kReaders<Shape>);
    keys.init(1, kReaders<Shape>);
    values.init(kGated ? 1 + 32 : 1, kReaders<Shape>);
    for (int& tile_number : used_up) tile_number = 0;
  }
};

// ---- The warp that loads ------------------------------------------------------------------------

template <typename Shape>
class HopperForwardProducer : public TileState {
  static constexpr int kD = Shape::kD, kKeys = Shape::kKeys;
  static constexpr bool kGated = Shape::kGated;
  static constexpr int kTileBytes = 2 * kKeys * kD;
  using Shared = HopperForwardShared<Shape>;

 public:
  __device__ __forceinline__ HopperForwardProducer(Shared& shared, const HopperForwardArguments& x)
      : s_(shared), x_(x) {}

  __device__ __forceinline__ QueryTile tile_of(int tile, int head) const {
    const int first = tile * Shape::kQueries;
    const int lowest =
        visibility_of<false, Shape::kFar>(x_.p, StickHead(x_.p, head)).first_key(first);
    const int end = end_key_of_rows<Shape::kFar>(x_.p, first + Shape::kQueries);
    const int last = (end - 1) / kKeys * kKeys;
    if constexpr (Shape::kFar) {
      if (came_used_up(first, head)) return {first, head, last, last};
    }
    return {first, head, lowest / kKeys * kKeys, last};
  }
  __device__ __forceinline__ void load(const QueryTile& tile) {
    load_until_used_up(tile);
    ++number_;
  }

 private:
  // Whether nothing is left of any stick of the tile, as its consumers will find: one block is then
  // enough for them to end. Blocks beyond it would be on their way before they say so.
  __device__ __forceinline__ bool came_used_up(int first, int head) const {
    const StickHead rows(x_.p, head);
    bool done = true;
    for (int row = first + lane(); row < first + Shape::kQueries; row += 32) {
      done = done && row_came_used_up(x_.p, rows, row);
    }
    return __all_sync(~0u, done) != 0;
  }
  __device__ __forceinline__ void load_until_used_up(const QueryTile& tile) {
    for (int block = tile.last;; block -= kKeys) {
      Mbarrier& full = s_.keys.acquire(k_);
      const bool ends = x_.p.skip_epsilon > 0 && all_used_up();
      load_keys(full, tile, block, ends);
      k_.advance();
      if (ends) return;
      if (block == tile.last) load_queries(tile);
      load_values(tile, block);
      if (block <= tile.begin) return;
    }
  }
  __device__ __forceinline__ bool all_used_up() const {
    bool all = true;
    for (int i = 0; i < Shape::kConsumers; ++i) {
      all = all && *const_cast<volatile int*>(&s_.used_up[i]) == number_;
    }
    return __shfl_sync(~0u, all, 0);
  }
  __device__ __forceinline__ void load_keys(Mbarrier& full, const QueryTile& tile, int block,
                                            bool ends) {
    const int first = first_loaded_key<kKeys>(block, x_.p.tokens);
    if (lane() != 0) return;
    s_.ends[k_.stage()] = ends;
    if (ends) {
      full.arrive();
    } else {
      full.arrive_and_expect(kTileBytes);
      load_key_tile<kKeys, kD>(s_.k[k_.stage()], x_.k, full, first, tile.head / x_.p.group);
    }
  }
  __device__ __forceinline__ void load_gates(Mbarrier& full, int head, int first) {
    const float* const gates = x_.p.gate + first * x_.p.gate_stride + head;
    float gate[kKeys / 32];
#pragma unroll
    for (int i = 0; i < kKeys / 32; ++i) gate[i] = gates[(32 * i + lane()) * x_.p.gate_stride];
#pragma unroll
    for (int i = 0; i < kKeys / 32; ++i) s_.gates[v_.stage()].set(32 * i + lane(), gate[i]);
    full.arrive();
  }
  __device__ __forceinline__ void load_queries(const QueryTile& tile) {
    Mbarrier& full = s_.queries.acquire(tile_state());
    if (lane() != 0) return;
    full.arrive_and_expect(2 * Shape::kQueries * kD);
    load_token_tile<Shape::kQueries, kD>(s_.q, x_.q, full, tile.first, tile.head);
  }
  __device__ __forceinline__ void load_values(const QueryTile& tile, int block) {
    const int first = first_loaded_key<kKeys>(block, x_.p.tokens);
    Mbarrier& full = s_.values.acquire(v_);
    if (lane() == 0) {
      full.arrive_and_expect(kTileBytes);
      load_key_tile<kKeys, kD>(s_.v[v_.stage()], x_.v, full, first, tile.head / x_.p.group);
    }
    __syncwarp();
    if constexpr (kGated) load_gates(full, tile.head, first);
    v_.advance();
  }

  Shared& s_;
  const HopperForwardArguments& x_;
  PipelineState<Shape::kStages> k_, v_;
  int number_ = 1;  // of the tile
};

// ---- The warpgroups that compute ----------------------------------------------------------------

template <typename Shape>
class HopperForwardConsumer : public TileState {
  static constexpr int kD = Shape::kD, kKeys = Shape::kKeys;
  static constexpr bool kGated = Shape::kGated;
  using Shared = HopperForwardShared<Shape>;
  using Scores = WarpgroupAccumulator<kKeys>;

 public:
  __device__ __forceinline__ HopperForwardConsumer(Shared& shared, const HopperForwardArguments& x,
                                                   int index)
      : s_(shared), p_(x.p), index_(index), group_{1 + index, 128 * (index + 1)} {}

  __device__ __forceinline__ void compute(const QueryTile& tile) {
    const StickHead head(p_, tile.head);
    const int first = tile.first + 64 * index_ + 16 * (group_.warp());
    State x;
    x.block = tile.last;
    x.lowest = tile.begin;
    x.o.clear();
    Scores s;
    s_.queries.wait(tile_state());
    issue_scores<Shape>(s_, k_, 64 * index_, s);
    const TileRowKeys seen(visibility_of<false, Shape::kFar>(p_, head), first);
    if constexpr (Shape::kFar) bring_sticks(x.sticks, p_, head, first);
    wait_for_products<0>();
    s.pin();
    s_.keys.release_and_advance(k_);
    const bool drained = walk(x, s, seen);
    if (drained) drain(x);
    ++number_;
    if constexpr (Shape::kFar) {
      if (uniform(group_.all(came_used_up<2>(p_, head, first)))) {
        return write_used_up<2>(p_, head, first);
      }
    }
    write_sticks<1, kD, Shape::kFar>(p_, head, first, x.block, x.o, seen, x.sticks);
  }

 private:
  struct State {
    int block, lowest;
    std::conditional_t<kGated, GatedSticks<2, kKeys>, Sticks<2, kKeys, false>> sticks;
    WarpgroupAccumulator<kD> o;
    WarpgroupOperand<kKeys> a;  // of the product with values that is under way
    bool values_pending = false;
  };

  // Both return whether the sticks were used up before the last block. Then the product with the
  // values of x.block is complete, and the keys of the block after it have been released.
  __device__ __forceinline__ bool walk(State& x, Scores& s, const TileRowKeys& seen) {
    while (x.block > x.lowest) {
      break_sticks(x, s, seen);
      wait_for_products<0>();
      take_operand(x, s);
      issue_scores<Shape>(s_, k_, 64 * index_, s);
      issue_output<Shape>(s_, v_, x.o, x.a);
      wait_for_products<1>();
      s.pin();
      s_.keys.release_and_advance(k_);
      if (ends(x, seen)) return true;
      x.block -= kKeys;
    }
    finish(x, s, seen);
    return false;
  }
  __device__ __forceinline__ void finish(State& x, Scores& s, const TileRowKeys& seen) {
    s_.queries.release();
    break_sticks(x, s, seen);
    wait_for_products<0>();
    take_operand(x, s);
    issue_output<Shape>(s_, v_, x.o, x.a);
    complete_values(x);
  }
  __device__ __forceinline__ void complete_values(State& x) {
    wait_for_products<0>();
    x.o.pin();
    x.a.pin();
    s_.values.release_and_advance(v_);
  }

  __device__ __forceinline__ void break_sticks(State& x, Scores& s, const TileRowKeys& seen) {
    const int first = first_loaded_key<kKeys>(x.block, p_.tokens);
    const BlockKeys keys{seen, x.block};
    if constexpr (kGated) {  // gates come with the values
      s_.values.wait(gates_);
      x.sticks.score(s, first, score_scale<Shape>(p_), keys, s_.gates[gates_.stage()]);
      gates_.advance();
    } else {
      x.sticks.score(s, first, score_scale<Shape>(p_), keys, nullptr);
    }
  }
  // A of the scores becomes the operand, after the product that had it before.
  __device__ __forceinline__ void take_operand(State& x, const Scores& s) {
    x.o.pin();
    x.a.pin();
    if (x.values_pending) s_.values.release_and_advance(v_);
    x.values_pending = true;
    round_to_operand(x.a, s);
  }
  // Whether the sticks are used up after x.block, which is not the last one.
  __device__ __forceinline__ bool ends(State& x, const TileRowKeys& seen) {
    if (p_.skip_epsilon == 0) return false;
    if (!uniform(group_.all(used_up(x.sticks, seen, x.block, p_.skip_epsilon)))) return false;
    s_.queries.release();
    complete_values(x);
    return true;
  }
  // Passes over what the producer has loaded for the other consumers, or before it knew.
  __device__ __forceinline__ void drain(const State& x) {
    if (group_.thread() == 0) *const_cast<volatile int*>(&s_.used_up[index_]) = number_;
    for (int block = x.block - kKeys;; block -= kKeys) {
      s_.values.wait(v_);
      s_.values.release_and_advance(v_);
      if constexpr (kGated) gates_.advance();
      if (block <= x.lowest) return;
      s_.keys.wait(k_);
      const bool end = s_.ends[k_.stage()];
      s_.keys.release_and_advance(k_);
      if (end) return;
    }
  }

  Shared& s_;
  const StickBreakingProblem& p_;
  const int index_;
  const NamedThreads<128> group_;
  PipelineState<Shape::kStages> k_, v_, gates_;
  int number_ = 1;  // of the tile
};

// ---- The main loop ------------------------------------------------------------------------------

template <typename Tiles>
struct StickForwardMainloop {
  using Shape = Tiles;
  using Arguments = HopperForwardArguments;
  using Shared = HopperForwardShared<Shape>;
  using Producer = HopperForwardProducer<Shape>;
  using Consumer = HopperForwardConsumer<Shape>;
  static constexpr int kTileRows = Shape::kQueries;
  static QuerySteps<Shape::kFar> steps(const StickBreakingProblem& p) {
    return {p, Shape::kQueries, Shape::kKeys};
  }
  static __device__ __forceinline__ void prefetch(const Arguments& x) {
    prefetch_tensor_map(x.q);
    prefetch_tensor_map(x.k);
    prefetch_tensor_map(x.v);
  }
};

}  // namespace sbtrain::kernels
