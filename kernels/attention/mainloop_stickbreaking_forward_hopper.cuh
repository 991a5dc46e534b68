// Stick-breaking attention forward for sm_90a: persistent and warp-specialised. One warp loads;
// each of the other warpgroups, the consumers, owns 64 queries of a tile and walks over their
// blocks of keys from right to left, like the portable loop (mainloop_stickbreaking_forward.cuh).
// While it breaks sticks over one block, the product with the values of the block before is under
// way on the tensor cores. To issue the scores of the next block by then would take 64 more
// registers, which measured slower.
#pragma once

#include "kernels/attention/mainloop_stickbreaking_forward.cuh"
#include "kernels/attention/stickbreaking_tiles_hopper.cuh"
#include "kernels/attention/tile_queue.cuh"

namespace sbtrain::kernels {

// With kFewTiles, for packs so short that each tile has a multiprocessor of its own in any case,
// tiles are as small as can be: they are done sooner.
template <int kHeadDim, bool kHasGates, bool kFewTiles = false>
struct HopperForwardShape {
  static constexpr int kD = kHeadDim;
  static constexpr bool kGated = kHasGates;
  // Gates need registers.
  static constexpr int kKeys = kGated ? 64 : 128;
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
  TileQueue queue;
  CUtensorMap q, k, v;
};

// The tile that the producer has taken for the block.
struct ForwardTile {
  int first;  // query; < 0: there are no more tiles
  int head;
  int lowest, last;  // blocks of keys
};

template <typename Shape>
struct HopperForwardShared {
  static constexpr int kD = Shape::kD, kKeys = Shape::kKeys, kStages = Shape::kStages;
  static constexpr bool kGated = Shape::kGated;
  alignas(1024) __nv_bfloat16 q[Shape::kQueries * kD];
  alignas(1024) __nv_bfloat16 k[kStages][kKeys * kD];
  alignas(1024) __nv_bfloat16 v[kStages][kKeys * kD];
  float gates[kGated ? kStages : 1][kKeys];
  Mbarrier q_full, q_empty, tile_full, tile_empty;
  Mbarrier k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  ForwardTile tile;
  bool ends[kStages];              // the stage holds no keys: all sticks of the tile are used up
  int used_up[Shape::kConsumers];  // the last tile in which the consumer's sticks were, from 1

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
      v_full[i].init(kGated ? 1 + 32 : 1);
      v_empty[i].init(kReaders);
    }
    for (int& tile_number : used_up) tile_number = 0;
    fence_mbarrier_init();
  }
};

// ---- The warp that loads ------------------------------------------------------------------------

template <typename Shape>
class HopperForwardProducer {
  static constexpr int kD = Shape::kD, kKeys = Shape::kKeys;
  static constexpr bool kGated = Shape::kGated;
  static constexpr int kTileBytes = 2 * kKeys * kD;
  using Shared = HopperForwardShared<Shape>;

 public:
  __device__ __forceinline__ HopperForwardProducer(Shared& shared, const HopperForwardArguments& x)
      : s_(shared), x_(x) {}

  __device__ __forceinline__ void run() {
    for (int number = 1;; ++number) {
      const ForwardTile tile = take();
      s_.tile_empty.wait(tile_parity_ ^ 1);
      if (lane() == 0) {
        s_.tile = tile;
        s_.tile_full.arrive();
      }
      if (tile.first < 0) return;
      load(tile, number);
      tile_parity_ ^= 1;
    }
  }

 private:
  __device__ __forceinline__ ForwardTile take() const {
    const auto [tile, head] = take_tile_by_warp(x_.queue, tile_parity_ != 0);
    if (tile < 0) return {-1, 0, 0, 0};
    const StickHead h(x_.p, head);
    const int first = tile * Shape::kQueries;
    const int lowest = visibility_of<false>(x_.p, h).first_key(first);
    const int end = min(first + Shape::kQueries, x_.p.tokens);
    return {first, head, lowest / kKeys * kKeys, (end - 1) / kKeys * kKeys};
  }

  __device__ __forceinline__ void load(const ForwardTile& tile, int number) {
    for (int block = tile.last;; block -= kKeys) {
      s_.k_empty[k_.stage()].wait(k_.parity() ^ 1);
      const bool ends = x_.p.skip_epsilon > 0 && all_used_up(number);
      load_keys(tile, block, ends);
      k_.advance();
      if (ends) return;
      if (block == tile.last) load_queries(tile);
      load_values(tile, block);
      if (block <= tile.lowest) return;
    }
  }
  __device__ __forceinline__ bool all_used_up(int number) const {
    bool all = true;
    for (int i = 0; i < Shape::kConsumers; ++i) {
      all = all && *const_cast<volatile int*>(&s_.used_up[i]) == number;
    }
    return __shfl_sync(~0u, all, 0);
  }
  __device__ __forceinline__ void load_keys(const ForwardTile& tile, int block, bool ends) {
    Mbarrier& full = s_.k_full[k_.stage()];
    const int first = first_loaded_key<kKeys>(block, x_.p.tokens);
    if (lane() != 0) return;
    s_.ends[k_.stage()] = ends;
    if (ends) {
      full.arrive();
    } else {
      full.arrive_and_expect(kTileBytes);
      load_key_tile<kKeys, kD>(s_.k[k_.stage()], x_.k, full, first, tile.head);
    }
  }
  __device__ __forceinline__ void load_gates(int head, int first) {
    for (int i = lane(); i < kKeys; i += 32) {
      cp_async4(shared_address(&s_.gates[v_.stage()][i]),
                x_.p.gate + (first + i) * x_.p.gate_stride + head);
    }
  }
  __device__ __forceinline__ void load_queries(const ForwardTile& tile) {
    s_.q_empty.wait(tile_parity_ ^ 1);
    if (lane() != 0) return;
    s_.q_full.arrive_and_expect(2 * Shape::kQueries * kD);
    load_token_tile<Shape::kQueries, kD>(s_.q, x_.q, s_.q_full, tile.first, tile.head);
  }
  __device__ __forceinline__ void load_values(const ForwardTile& tile, int block) {
    Mbarrier& full = s_.v_full[v_.stage()];
    const int first = first_loaded_key<kKeys>(block, x_.p.tokens);
    s_.v_empty[v_.stage()].wait(v_.parity() ^ 1);
    if constexpr (kGated) {
      load_gates(tile.head, first);
      full.arrive_after_copies();
    }
    if (lane() == 0) {
      full.arrive_and_expect(kTileBytes);
      load_key_tile<kKeys, kD>(s_.v[v_.stage()], x_.v, full, first, tile.head);
    }
    v_.advance();
  }

  Shared& s_;
  const HopperForwardArguments& x_;
  RingPlace<Shape::kStages> k_, v_;
  uint32_t tile_parity_ = 0;
};

// ---- The warpgroups that compute ----------------------------------------------------------------

template <typename Shape>
class HopperForwardConsumer {
  static constexpr int kD = Shape::kD, kKeys = Shape::kKeys;
  static constexpr bool kGated = Shape::kGated;
  using Shared = HopperForwardShared<Shape>;
  using Scores = WarpgroupAccumulator<kKeys>;

 public:
  __device__ __forceinline__ HopperForwardConsumer(Shared& shared, const StickBreakingProblem& p,
                                                   int index)
      : s_(shared), p_(p), index_(index), group_{1 + index, 128 * (index + 1)} {}

  __device__ __forceinline__ void run() {
    for (int number = 1;; ++number) {
      s_.tile_full.wait(tile_parity_);
      const ForwardTile tile = {uniform(s_.tile.first), uniform(s_.tile.head),
                                uniform(s_.tile.lowest), uniform(s_.tile.last)};
      release(s_.tile_empty);
      if (tile.first < 0) return;
      compute(tile, number);
      tile_parity_ ^= 1;
    }
  }

 private:
  struct State {
    int block, lowest;
    Sticks<2, kKeys, kGated> sticks;
    WarpgroupAccumulator<kD> o;
    WarpgroupOperand<kKeys> a;  // of the product with values that is under way
    bool values_pending = false;
  };

  __device__ __forceinline__ void compute(const ForwardTile& tile, int number) {
    const StickHead head(p_, tile.head);
    const int first = tile.first + 64 * index_ + 16 * (group_.warp());
    State x;
    x.block = tile.last;
    x.lowest = tile.lowest;
    x.o.clear();
    Scores s;
    s_.q_full.wait(tile_parity_);
    issue_scores(s);
    const TileRowKeys seen(visibility_of<false>(p_, head), first);
    wait_for_products<0>();
    s.pin();
    release_keys();
    const bool drained = walk(x, s, seen);
    if (drained) drain(x, number);
    write_sticks<1, kD>(p_, head, first, x.block, x.o, seen, x.sticks);
  }

  // Both return whether the sticks were used up before the last block. Then the product with the
  // values of x.block is complete, and the keys of the block after it have been released.
  __device__ __forceinline__ bool walk(State& x, Scores& s, const TileRowKeys& seen) {
    while (x.block > x.lowest) {
      break_sticks(x, s, seen);
      wait_for_products<0>();
      take_operand(x, s);
      issue_scores(s);
      issue_values(x);
      wait_for_products<1>();
      s.pin();
      release_keys();
      if (ends(x, seen)) return true;
      x.block -= kKeys;
    }
    finish(x, s, seen);
    return false;
  }
  __device__ __forceinline__ void finish(State& x, Scores& s, const TileRowKeys& seen) {
    release(s_.q_empty);
    break_sticks(x, s, seen);
    wait_for_products<0>();
    take_operand(x, s);
    issue_values(x);
    complete_values(x);
  }
  __device__ __forceinline__ void complete_values(State& x) {
    wait_for_products<0>();
    x.o.pin();
    x.a.pin();
    release_values();
  }

  __device__ __forceinline__ void issue_scores(Scores& s) {
    s_.k_full[k_.stage()].wait(k_.parity());
    const TileOperand<Shape::kQueries, kD, TileUse::kRows> queries(s_.q +
                                                                   64 * index_ * kPanelCols<kD>);
    const TileOperand<kKeys, kD, TileUse::kRows> keys(s_.k[k_.stage()]);
    s.pin();
    wgmma_fence();
    issue_product<kD>(s, queries, keys);
    wgmma_commit();
  }
  __device__ __forceinline__ void break_sticks(State& x, Scores& s, const TileRowKeys& seen) {
    const int first = first_loaded_key<kKeys>(x.block, p_.tokens);
    const float* gates = nullptr;
    if constexpr (kGated) {  // they come with the values
      s_.v_full[gates_.stage()].wait(gates_.parity());
      gates = s_.gates[gates_.stage()];
      gates_.advance();
    }
    x.sticks.score(s, first, p_.scale * kLog2e, BlockKeys{seen, x.block}, gates);
  }
  // A of the scores becomes the operand, after the product that had it before.
  __device__ __forceinline__ void take_operand(State& x, const Scores& s) {
    x.o.pin();
    x.a.pin();
    if (x.values_pending) release_values();
    x.values_pending = true;
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

  // Whether the sticks are used up after x.block, which is not the last one.
  __device__ __forceinline__ bool ends(State& x, const TileRowKeys& seen) {
    if (p_.skip_epsilon == 0) return false;
    if (!uniform(group_.all(used_up(x.sticks, seen, x.block, p_.skip_epsilon)))) return false;
    release(s_.q_empty);
    complete_values(x);
    return true;
  }
  // Passes over what the producer has loaded for the other consumers, or before it knew.
  __device__ __forceinline__ void drain(const State& x, int number) {
    if (group_.thread() == 0) *const_cast<volatile int*>(&s_.used_up[index_]) = number;
    for (int block = x.block - kKeys;; block -= kKeys) {
      s_.v_full[v_.stage()].wait(v_.parity());
      release_values();
      if constexpr (kGated) gates_.advance();
      if (block <= x.lowest) return;
      s_.k_full[k_.stage()].wait(k_.parity());
      const bool end = s_.ends[k_.stage()];
      release_keys();
      if (end) return;
    }
  }

  __device__ __forceinline__ void release(Mbarrier& empty) {
    __syncwarp();
    if (lane() == 0) empty.arrive();
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
  const StickBreakingProblem& p_;
  const int index_;
  const NamedThreads<128> group_;
  RingPlace<Shape::kStages> k_, v_, gates_;
  uint32_t tile_parity_ = 0;
};

// ---- The kernel ---------------------------------------------------------------------------------

template <typename Shape>
static __global__ void __launch_bounds__(Shape::kThreads, 1)
    stick_forward_hopper_kernel(const __grid_constant__ HopperForwardArguments x) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char memory[];
  auto& shared = aligned_shared<HopperForwardShared<Shape>>(memory);
  if (threadIdx.x == 0) {
    shared.init();
    prefetch_tensor_map(x.q);
    prefetch_tensor_map(x.k);
    prefetch_tensor_map(x.v);
  }
  __syncthreads();
  static_assert(kRegistersSuffice<Shape>);
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / 128);
  if (warpgroup == 0) {
    lower_registers<Shape::kProducerRegisters>();
    if (threadIdx.x < 32) HopperForwardProducer<Shape>(shared, x).run();
  } else {
    raise_registers<Shape::kConsumerRegisters>();
    HopperForwardConsumer<Shape>(shared, x.p, warpgroup - 1).run();
  }
#else
  __trap();  // the build has no code for this GPU: CMAKE_CUDA_ARCHITECTURES lacks 90a
#endif
}

}  // namespace sbtrain::kernels
