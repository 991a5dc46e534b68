// Softmax attention forward for sm_90a: persistent and warp-specialised, as that of stick-breaking
// (mainloop_stickbreaking_forward_hopper.cuh). One warp loads; each of the other warpgroups, the
// consumers, owns 64 queries of a tile and walks over their blocks of keys from right to left.
// While it exponentiates the scores of one block, the product with the values of the block before
// is under way on the tensor cores. So o is rescaled only after that (FlashAttention-3, arXiv
// 2407.08608, section 3.2).
#pragma once

#include "kernels/attention/mainloop_softmax_forward.cuh"
#include "kernels/attention/softmax_tiles_hopper.cuh"

namespace sbtrain::kernels {

template <int kHeadDim, int kWarpgroups>
struct HopperSoftmaxForwardTiles {
  static constexpr int kD = kHeadDim;
  static constexpr int kRowBlocks = 1;  // of 16 queries, each warp
  static constexpr int kKeys = 128;
  static constexpr int kConsumers = kWarpgroups;
  static constexpr int kQueries = 64 * kConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kStages = kD <= 64 ? 4 : 2;
};
// Narrow heads leave registers for a third consumer, unless the score takes them.
template <int kHeadDim, typename Policy>
using HopperSoftmaxForwardTilesOf =
    HopperSoftmaxForwardTiles<kHeadDim, (kHeadDim <= 64 && !kStagesScores<Policy>) ? 3 : 2>;

template <int kHeadDim, typename Policy>
struct HopperSoftmaxForwardShape : HopperSoftmaxForwardTilesOf<kHeadDim, Policy> {
  using Tiles = HopperSoftmaxForwardTilesOf<kHeadDim, Policy>;
  using Scores = typename Policy::template QueryRows<Tiles>;
  static constexpr bool kStaged = kStagesScores<Policy>;
  static constexpr int kProducerRegisters = kStaged ? 40 : 24;
  static constexpr int kConsumerRegisters = Tiles::kConsumers == 3 ? 160 : kStaged ? 232 : 240;
};

template <typename Shape>
struct HopperSoftmaxForwardShared {
  static constexpr int kD = Shape::kD, kKeys = Shape::kKeys, kStages = Shape::kStages;
  alignas(1024) __nv_bfloat16 q[Shape::kQueries * kD];
  alignas(1024) __nv_bfloat16 k[kStages][kKeys * kD];
  alignas(1024) __nv_bfloat16 v[kStages][kKeys * kD];
  alignas(16) unsigned char staged[kStages][Shape::kStaged ? Shape::Scores::stage_bytes() : 16];
  Mbarrier q_full, q_empty, tile_full, tile_empty;
  Mbarrier k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  SoftmaxTile tile;

  // By one thread.
  __device__ __forceinline__ void init() {
    constexpr int kReaders = 4 * Shape::kConsumers;  // one lane of each warp
    q_full.init(1);
    q_empty.init(kReaders);
    tile_full.init(1);
    tile_empty.init(kReaders);
    for (int i = 0; i < kStages; ++i) {
      k_full[i].init(1);
      k_empty[i].init(kReaders);
      v_full[i].init(Shape::kStaged ? 1 + 32 : 1);
      v_empty[i].init(kReaders);
    }
    fence_mbarrier_init();
  }
};

// ---- The warp that loads ------------------------------------------------------------------------

template <typename Shape, typename Policy>
class HopperSoftmaxForwardProducer {
  static constexpr int kD = Shape::kD, kKeys = Shape::kKeys;
  static constexpr int kTileBytes = 2 * kKeys * kD;
  using Scores = typename Shape::Scores;
  using Shared = HopperSoftmaxForwardShared<Shape>;
  using Arguments = HopperSoftmaxArguments<Policy>;

 public:
  __device__ __forceinline__ HopperSoftmaxForwardProducer(Shared& shared, const Arguments& x)
      : s_(shared), x_(x) {}

  __device__ __forceinline__ void run() {
    for (;;) {
      const SoftmaxTile tile =
          take_tile_of_queries<Shape::kQueries, kKeys>(x_.p, x_.queue, tile_parity_ != 0);
      s_.tile_empty.wait(tile_parity_ ^ 1);
      if (lane() == 0) {
        s_.tile = tile;
        s_.tile_full.arrive();
      }
      if (tile.first < 0) return;
      load(tile);
      tile_parity_ ^= 1;
    }
  }

 private:
  __device__ __forceinline__ void load(const SoftmaxTile& tile) {
    Scores scores(x_.policy, {tile.head, tile.first, 0});
    for (int block = tile.last; block >= tile.begin; block -= kKeys) {
      load_keys(tile, block);
      if (block == tile.last) load_queries(tile);
      load_values(scores, tile, block);
      place_.advance();
    }
  }
  __device__ __forceinline__ void load_keys(const SoftmaxTile& tile, int block) {
    const int stage = place_.stage();
    s_.k_empty[stage].wait(place_.parity() ^ 1);
    if (lane() != 0) return;
    s_.k_full[stage].arrive_and_expect(kTileBytes);
    load_token_tile<kKeys, kD>(s_.k[stage], x_.k, s_.k_full[stage], block, tile.head);
  }
  __device__ __forceinline__ void load_queries(const SoftmaxTile& tile) {
    s_.q_empty.wait(tile_parity_ ^ 1);
    if (lane() != 0) return;
    s_.q_full.arrive_and_expect(2 * Shape::kQueries * kD);
    load_token_tile<Shape::kQueries, kD>(s_.q, x_.q, s_.q_full, tile.first, tile.head);
  }
  __device__ __forceinline__ void load_values(Scores& scores, const SoftmaxTile& tile, int block) {
    const int stage = place_.stage();
    Mbarrier& full = s_.v_full[stage];
    s_.v_empty[stage].wait(place_.parity() ^ 1);
    if constexpr (Shape::kStaged) {
      scores.load(BlockThreads<32>(), s_.staged[stage], block);
      full.arrive_after_copies();
    }
    if (lane() != 0) return;
    full.arrive_and_expect(kTileBytes);
    load_token_tile<kKeys, kD>(s_.v[stage], x_.v, full, block, tile.head);
  }

  Shared& s_;
  const Arguments& x_;
  RingPlace<Shape::kStages> place_;
  uint32_t tile_parity_ = 0;
};

// ---- The warpgroups that compute ----------------------------------------------------------------

template <typename Shape, typename Policy>
class HopperSoftmaxForwardConsumer {
  static constexpr int kD = Shape::kD, kKeys = Shape::kKeys;
  using Scores = typename Shape::Scores;
  using Shared = HopperSoftmaxForwardShared<Shape>;
  using Arguments = HopperSoftmaxArguments<Policy>;
  using Tile = WarpgroupAccumulator<kKeys>;

 public:
  __device__ __forceinline__ HopperSoftmaxForwardConsumer(Shared& shared, const Arguments& x,
                                                          int index)
      : s_(shared), x_(x), index_(index) {}

  __device__ __forceinline__ void run() {
    for (;;) {
      s_.tile_full.wait(tile_parity_);
      const SoftmaxTile tile = {uniform(s_.tile.first), uniform(s_.tile.head),
                                uniform(s_.tile.begin), uniform(s_.tile.last)};
      release(s_.tile_empty);
      if (tile.first < 0) return;
      compute(tile);
      tile_parity_ ^= 1;
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

  __device__ __forceinline__ void compute(const SoftmaxTile& tile) {
    const SoftmaxProblem& p = x_.p;
    const int warp = uniform(static_cast<int>(threadIdx.x) / 32) % 4;
    const int warp_row = 64 * index_ + 16 * warp;
    const int first = tile.first + warp_row;
    const SoftmaxTile mine = tile_of_queries<64, kKeys>(p, tile.first + 64 * index_, tile.head);
    const int begin = uniform(mine.begin), last = uniform(mine.last);
    for (int block = tile.last; block > last; block -= kKeys) pass_over();
    State x;
    x.o.clear();
    Tile s;
    s_.q_full.wait(tile_parity_);
    issue_scores(s);
    Scores scores(x_.policy, {tile.head, tile.first, warp_row});
    const TileRowKeys seen(visibility_of(p), first);
    wait_for_products<0>();
    s.pin();
    release_keys();
    for (int block = last;; block -= kKeys) {
      exponentiate(x, s, scores, seen, block);
      wait_for_products<0>();
      take_operand(x, s);
      if (block <= begin) break;
      issue_scores(s);
      issue_values(x);
      wait_for_products<1>();
      s.pin();
      release_keys();
    }
    release(s_.q_empty);
    issue_values(x);
    wait_for_products<0>();
    x.o.pin();
    x.a.pin();
    release_values();
    for (int block = begin; block > tile.begin; block -= kKeys) pass_over();
    write_softmax<1>(p, SoftmaxHead(p, tile.head), first, x.o, x.softmax);
  }

  // Leaves out a block that only other consumers' queries see.
  __device__ __forceinline__ void pass_over() {
    s_.k_full[k_.stage()].wait(k_.parity());
    release_keys();
    s_.v_full[v_.stage()].wait(v_.parity());
    release_values();
    staged_.advance();
  }

  __device__ __forceinline__ void issue_scores(Tile& s) {
    s_.k_full[k_.stage()].wait(k_.parity());
    const TileOperand<Shape::kQueries, kD, TileUse::kRows> queries(s_.q +
                                                                   64 * index_ * kPanelCols<kD>);
    const TileOperand<kKeys, kD, TileUse::kRows> keys(s_.k[k_.stage()]);
    s.pin();
    wgmma_fence();
    issue_product<kD>(s, queries, keys);
    wgmma_commit();
  }
  // Products of queries and keys become probabilities, relative to the maxima so far.
  __device__ __forceinline__ void exponentiate(State& x, Tile& s, Scores& scores,
                                               const TileRowKeys& seen, int block) {
    const void* staged = nullptr;
    if constexpr (Shape::kStaged) {  // it comes with the values
      s_.v_full[staged_.stage()].wait(staged_.parity());
      staged = s_.staged[staged_.stage()];
      staged_.advance();
    }
    scores.enter(staged, block);
    scores.score(s);
    mask(s, seen, block, -INFINITY);
    x.raised = x.softmax.raise(s, x.factor);
    x.softmax.exponentiate(s);
  }
  // The probabilities become the operand, after the product that had it before.
  __device__ __forceinline__ void take_operand(State& x, const Tile& s) {
    x.o.pin();
    x.a.pin();
    if (x.values_pending) release_values();
    x.values_pending = true;
    if (x.raised) RunningSoftmax<1>::rescale(x.factor, x.o);
    round_to_operand(x.a, s);
  }
  __device__ __forceinline__ void issue_values(State& x) {
    s_.v_full[v_.stage()].wait(v_.parity());
    x.a.pin();
    x.o.pin();
    wgmma_fence();
    issue_product<kKeys>(x.o, x.a, TileOperand<kKeys, kD, TileUse::kColumns>(s_.v[v_.stage()]));
    wgmma_commit();
  }

  __device__ __forceinline__ void release_keys() {
    release(s_.k_empty[k_.stage()]);
    k_.advance();
  }
  __device__ __forceinline__ void release_values() {
    release(s_.v_empty[v_.stage()]);
    v_.advance();
  }

  Shared& s_;
  const Arguments& x_;
  const int index_;
  RingPlace<Shape::kStages> k_, v_, staged_;
  uint32_t tile_parity_ = 0;
};

// ---- The kernel ---------------------------------------------------------------------------------

template <typename Shape, typename Policy>
static __global__ void __launch_bounds__(Shape::kThreads, 1)
    softmax_forward_hopper_kernel(const __grid_constant__ HopperSoftmaxArguments<Policy> x) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char memory[];
  auto& shared = aligned_shared<HopperSoftmaxForwardShared<Shape>>(memory);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  static_assert(kRegistersSuffice<Shape>);
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / 128);
  if (warpgroup == 0) {
    lower_registers<Shape::kProducerRegisters>();
    if (threadIdx.x < 32) HopperSoftmaxForwardProducer<Shape, Policy>(shared, x).run();
  } else {
    raise_registers<Shape::kConsumerRegisters>();
    HopperSoftmaxForwardConsumer<Shape, Policy>(shared, x, warpgroup - 1).run();
  }
#else
  __trap();  // the build has no code for this GPU: CMAKE_CUDA_ARCHITECTURES lacks 90a
#endif
}

}  // namespace sbtrain::kernels
