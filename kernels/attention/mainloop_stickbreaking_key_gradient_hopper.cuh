// Phase 2 of the stick-breaking backward pass for sm_90a: dk and dv, from the states that phase 1
// left (mainloop_stickbreaking_query_gradient_hopper.cuh). Each consumer owns 64 keys of a tile and
// walks over the tiles of queries that see them.
#pragma once

#include "kernels/attention/stickbreaking_backward_hopper.cuh"

namespace sbtrain::kernels {

// Each of two consumers owns 64 keys of a tile. They share the queries and work apart otherwise.
template <int kHeadDim>
struct KeyGradientShape {
  static constexpr int kD = kHeadDim;
  static constexpr int kConsumers = 2;
  static constexpr int kKeys = 64 * kConsumers;
  static constexpr int kQueries = 64;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kStages = kD <= 64 ? 4 : 3;
  // Where shared memory is left for it: the next tile of queries is looked at before the scan of
  // this one, and A and dz are stored beside those of the tile before, which other warps may still
  // read.
  static constexpr bool kAhead = kD <= 64;
  static constexpr int kScoreTiles = kAhead ? 2 : 1;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;
};

template <typename Shape>
struct KeyGradientShared {
  static constexpr int kD = Shape::kD, kStages = Shape::kStages, kConsumers = Shape::kConsumers;
  alignas(1024) __nv_bfloat16 k[kConsumers][kStickKeys * kD];
  alignas(1024) __nv_bfloat16 v[kConsumers][kStickKeys * kD];
  alignas(1024) __nv_bfloat16 q[kStages][Shape::kQueries * kD];
  alignas(1024) __nv_bfloat16 dout[kStages][Shape::kQueries * kD];
  alignas(1024) __nv_bfloat16 a[Shape::kScoreTiles][kConsumers][Shape::kQueries * kStickKeys];
  alignas(1024) __nv_bfloat16 dz[Shape::kScoreTiles][kConsumers][Shape::kQueries * kStickKeys];
  float2 states[kStages][kConsumers][Shape::kQueries];
  int first_keys[kStages][Shape::kQueries];
  int first_query[kStages];  // < 0: there are no more queries for this tile
  Mbarrier keys_full, keys_empty, tile_full, tile_empty;
  Mbarrier full[kStages], empty[kStages];
  BackwardTile tile;
  int heads[4 * kConsumers];  // of the tile of each warp, which has no register left for it

  // By one thread.
  __device__ __forceinline__ void init() {
    constexpr int kReaders = 4 * kConsumers;  // one lane of each warp
    keys_full.init(1);
    keys_empty.init(kReaders);
    tile_full.init(1);
    tile_empty.init(kReaders);
    for (int i = 0; i < kStages; ++i) {
      full[i].init(1 + 32);
      empty[i].init(kReaders);
    }
    fence_mbarrier_init();
  }
};

template <typename Shape>
class KeyGradientProducer {
  static constexpr int kD = Shape::kD;
  using Shared = KeyGradientShared<Shape>;

 public:
  __device__ __forceinline__ KeyGradientProducer(Shared& shared, const HopperBackwardArguments& x)
      : s_(shared), x_(x) {}

  __device__ __forceinline__ void run() {
    for (;;) {
      QueuedTile next{};
      if (lane() == 0) next = take_tile(x_.queue);
      const int tile = __shfl_sync(~0u, next.tile, 0);
      const int head = x_.first_head + __shfl_sync(~0u, next.head, 0);
      s_.tile_empty.wait(tile_parity_ ^ 1);
      if (lane() == 0) {
        s_.tile = {tile < 0 ? -1 : tile * Shape::kKeys, head, 0, 0};
        s_.tile_full.arrive();
      }
      if (tile < 0) return;
      load(tile * Shape::kKeys, head);
      tile_parity_ ^= 1;
    }
  }

 private:
  __device__ __forceinline__ void load(int block, int head) {
    const StickBreakingProblem& p = x_.p;
    const Visibility seen = visibility_of<true>(p, StickHead(p, head));
    const int end_key = min(block + Shape::kKeys, p.tokens);
    const int end = seen.end_query(end_key - 1);
    load_keys(block, head);
    for (int some = block; some < end; some += 32 * Shape::kQueries) {
      // The first row of a tile is the one that sees furthest to the left.
      const int mine = some + lane() * Shape::kQueries;
      const bool needed = mine < end && (p.skip_epsilon == 0 || seen.first_key(mine) < end_key);
      for (unsigned tiles = __ballot_sync(~0u, needed); tiles; tiles &= tiles - 1) {
        load_queries(some + (__ffs(static_cast<int>(tiles)) - 1) * Shape::kQueries, block, head);
      }
    }
    load_queries(-1, block, head);
  }
  __device__ __forceinline__ void load_keys(int block, int head) {
    s_.keys_empty.wait(tile_parity_ ^ 1);
    if (lane() != 0) return;
    s_.keys_full.arrive_and_expect(2 * 2 * Shape::kKeys * kD);
    for (int i = 0; i < Shape::kConsumers; ++i) {
      const int first = first_loaded_key<kStickKeys>(block + i * kStickKeys, x_.p.tokens);
      load_key_tile<kStickKeys, kD>(s_.k[i], x_.k, s_.keys_full, first, head);
      load_key_tile<kStickKeys, kD>(s_.v[i], x_.v, s_.keys_full, first, head);
    }
  }
  __device__ __forceinline__ void load_queries(int first, int block, int head) {
    const int stage = place_.stage();
    Mbarrier& full = s_.full[stage];
    s_.empty[stage].wait(place_.parity() ^ 1);
    if (first >= 0) load_rows_of(first, block, head, stage);
    full.arrive_after_copies();
    if (lane() == 0) {
      s_.first_query[stage] = first;
      if (first < 0) {
        full.arrive();
      } else {
        full.arrive_and_expect(2 * 2 * Shape::kQueries * kD);
        load_token_tile<Shape::kQueries, kD>(s_.q[stage], x_.q, full, first, head);
        load_token_tile<Shape::kQueries, kD>(s_.dout[stage], x_.dout, full, first, head);
      }
    }
    place_.advance();
  }
  // Their states at the left edges of the consumers' blocks. Where there are none, the consumer
  // does not use what is copied. The warp waits for nothing here: what it would wait for, all
  // consumers would.
  __device__ __forceinline__ void load_rows_of(int first, int block, int head, int stage) {
#pragma unroll
    for (int i = lane(); i < Shape::kQueries; i += 32) {
      const int row = min(first + i, x_.p.tokens - 1);
      cp_async4(shared_address(&s_.first_keys[stage][i]), x_.first_key(head, row));
#pragma unroll
      for (int n = 0; n < Shape::kConsumers; ++n) {
        cp_async8(shared_address(&s_.states[stage][n][i]),
                  x_.states(head, x_.place(block / kStickKeys + n)) + row);
      }
    }
  }

  Shared& s_;
  const HopperBackwardArguments& x_;
  RingPlace<Shape::kStages> place_;
  uint32_t tile_parity_ = 0;
};

template <typename Shape>
class KeyGradientConsumer {
  static constexpr int kD = Shape::kD;
  using Shared = KeyGradientShared<Shape>;
  using Scores = WarpgroupAccumulator<kStickKeys>;

 public:
  __device__ __forceinline__ KeyGradientConsumer(Shared& shared, const HopperBackwardArguments& x,
                                                 int index)
      : s_(shared), x_(x), index_(index), group_{1 + index, 128 * (index + 1)} {}

  __device__ __forceinline__ void run() {
    for (;;) {
      s_.tile_full.wait(tile_parity_);
      const int first = uniform(s_.tile.first), head = uniform(s_.tile.head);
      release(s_.tile_empty);
      if (first < 0) return;
      int& warp_head = s_.heads[4 * index_ + group_.warp()];
      if (lane() == 0) warp_head = head;
      compute(first + kStickKeys * index_, warp_head);
      tile_parity_ ^= 1;
    }
  }

 private:
  __device__ __forceinline__ void compute(int block, const int& head) {
    const StickBreakingProblem& p = x_.p;
    const int first_key = first_loaded_key<kStickKeys>(block, p.tokens);
    const int warp_row = 16 * uniform(group_.warp()) % 64;
    WarpgroupAccumulator<kD> dk, dv;
    dk.clear();
    dv.clear();
    s_.keys_full.wait(tile_parity_);
    Scores s, dp;
    // The scores of a tile of queries are computed while the tile before becomes gradients. When
    // these are complete its stage is released, which is the one before `stage`.
    int stage = next_stage(block), next = -1;
    bool pending = false;
    HopperGradients sticks;
    TileRowKeys seen;
    if (stage >= 0) {
      issue_scores(s, dp, stage);
      if constexpr (Shape::kAhead) {
        seen = enter(sticks, block, stage);
        next = stage_if_seen(block);
      }
      wait_for_products<0>();
    }
    // The loop ends where no product is under way, which the compiler has to see.
    const bool any = stage >= 0;
    while (any) {
      s.pin();
      dp.pin();
      if (!Shape::kAhead) seen = enter(sticks, block, stage);
      sticks.score(s, dp, first_key, p.scale * kLog2e, BlockKeys{seen, block}, nullptr, nullptr);
      Operands x;
      x.round(s, dp);
      wait_for_products<0>();
      dk.pin();
      dv.pin();
      if (pending) release(s_.empty[(stage + Shape::kStages - 1) % Shape::kStages]);
      store(x, warp_row);
      if constexpr (!Shape::kAhead) next = stage_if_seen(block);
      if (next >= 0) {
        issue_scores(s, dp, next);
        issue_gradients(dk, dv, stage);
        stage = next;
        pending = true;
      } else {
        // The consumer holds no stage while it passes over tiles, however many: the producer has to
        // fill them all, for the other consumer, and needs every buffer for that.
        issue_gradients(dk, dv, stage);
        wait_for_products<0>();
        dk.pin();
        dv.pin();
        release(s_.empty[stage]);
        pending = false;
        stage = next_stage(block);
        if (stage < 0) break;
        issue_scores(s, dp, stage);
        wgmma_commit();  // an empty group in place of the gradients
      }
      if constexpr (Shape::kAhead) {
        seen = enter(sticks, block, stage);
        next = stage_if_seen(block);
      }
      wait_for_products<1>();
    }
    release(s_.keys_empty);
    __syncwarp();
    write(dk, dv, block, first_key, warp_row, head);
  }

  // A and dz of a tile, rounded.
  struct Operands {
    WarpgroupOperand<kStickKeys> a, dz;
    __device__ __forceinline__ void round(const Scores& s, const Scores& dp) {
      round_to_operand(a, s);
      round_to_operand(dz, dp);
    }
  };
  // Stores them to the tiles of scores that no warp reads any more. A warp stores only after its
  // own products, and that all warps have come so far says the barrier of the tile before, if there
  // are two tiles, or one more barrier.
  __device__ __forceinline__ void store(Operands& x, int warp_row) {
    score_tile_ = (score_tile_ + 1) % Shape::kScoreTiles;
    if constexpr (Shape::kScoreTiles == 1) group_.sync();
    x.a.pin();
    x.dz.pin();
    store_score_tile(s_.a[score_tile_][index_], warp_row, x.a);
    store_score_tile(s_.dz[score_tile_][index_], warp_row, x.dz);
    fence_async_proxy();
    group_.sync();
  }

  // Waits for the next tile of queries and returns its stage if they see a key of the block; -1 if
  // not, or if there are no more. Then the tile is still the next one.
  __device__ __forceinline__ int stage_if_seen(int block) {
    const int stage = place_.stage();
    s_.full[stage].wait(place_.parity());
    const int query = uniform(s_.first_query[stage]);
    const int begin = uniform(s_.first_keys[stage][0]);
    if (query < 0 || !sees(query, block, begin)) return -1;
    place_.advance();
    return stage;
  }
  // The same of the first tile from the next one on that sees a key; passes over the others.
  __device__ __forceinline__ int next_stage(int block) {
    for (;;) {
      const int stage = stage_if_seen(block);
      if (stage >= 0) return stage;
      const int passed = place_.stage();
      const bool end = uniform(s_.first_query[passed]) < 0;
      release(s_.empty[passed]);
      place_.advance();
      if (end) return -1;
    }
  }

  // Whether any of the 64 queries sees a key of the block; `begin` is the first key of the first.
  __device__ __forceinline__ bool sees(int query, int block, int begin) const {
    const int end = min(query + 63 + (x_.p.attend_current ? 1 : 0), x_.p.tokens);
    return block < end && begin < block + kStickKeys;
  }

  __device__ __forceinline__ void issue_scores(Scores& s, Scores& dp, int stage) {
    using Queries = TileOperand<Shape::kQueries, kD, TileUse::kRows>;
    using Keys = TileOperand<kStickKeys, kD, TileUse::kRows>;
    s.pin();
    dp.pin();
    wgmma_fence();
    issue_product<kD>(s, Queries(s_.q[stage]), Keys(s_.k[index_]));
    issue_product<kD>(dp, Queries(s_.dout[stage]), Keys(s_.v[index_]));
    wgmma_commit();
  }
  __device__ __forceinline__ void issue_gradients(WarpgroupAccumulator<kD>& dk,
                                                  WarpgroupAccumulator<kD>& dv, int stage) {
    using ScoreTile = TileOperand<Shape::kQueries, kStickKeys, TileUse::kColumns>;
    using Queries = TileOperand<Shape::kQueries, kD, TileUse::kColumns>;
    dk.pin();
    dv.pin();
    wgmma_fence();
    issue_product<Shape::kQueries>(dv, ScoreTile(s_.a[score_tile_][index_]),
                                   Queries(s_.dout[stage]), true);
    issue_product<Shape::kQueries>(dk, ScoreTile(s_.dz[score_tile_][index_]), Queries(s_.q[stage]),
                                   true);
    wgmma_commit();
  }

  // What the lane's rows see, and their states at the left edge of the block.
  __device__ __forceinline__ TileRowKeys enter(HopperGradients& sticks, int block,
                                               int stage) const {
    const int query = s_.first_query[stage];
    const int tokens = x_.p.tokens, own = x_.p.attend_current ? 1 : 0;
    const int warp_row = 16 * group_.warp();
    TileRowKeys seen;
    const auto begin_of = [&](int row) {
      return query + row < tokens ? s_.first_keys[stage][row] : INT_MAX;
    };
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = warp_row + lane_row() + 8 * i;
      seen.begin[i] = begin_of(row);
      const bool begun = seen.begin[i] < block + kStickKeys && block < query + row + own;
      const float2 state = s_.states[stage][index_][row];
      sticks.log2_left[i] = begun ? state.x : 0.0f;
      sticks.c[i] = begun ? state.y : 0.0f;
    }
    seen.end = query + warp_row + lane_row() + own;
    seen.last_begin = begin_of(warp_row + 15);
    seen.first_end = min(query + warp_row + own, tokens);
    return seen;
  }

  __device__ __forceinline__ void write(WarpgroupAccumulator<kD>& dk, WarpgroupAccumulator<kD>& dv,
                                        int block, int first_key, int warp_row, int head_index) {
    const StickBreakingProblem& p = x_.p;
    const StickHead head(p, head_index);
    const bool to_value = p.remainder == StickRemainder::kValue;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = first_key + key_of_row<kStickKeys>(warp_row + lane_row() + 8 * i);
      if (key < block || key >= p.tokens) continue;
      const float rem = to_value ? exp2_ftz(p.log2_rem[head.at(key)]) : 0.0f;
      __nv_bfloat16* const dk_row = head.row(p.dk, key) + lane_col();
      __nv_bfloat16* const dv_row = head.row(p.dv, key) + lane_col();
      const __nv_bfloat16* const dout_row = head.row(p.dout, key) + lane_col();
#pragma unroll
      for (int c = 0; c < kD / 8; ++c) {
        const float* const x = dk.at[0][c] + 2 * i;
        float y[2] = {dv.at[0][c][2 * i], dv.at[0][c][2 * i + 1]};
        if (to_value) {
          y[0] += rem * __bfloat162float(dout_row[8 * c]);
          y[1] += rem * __bfloat162float(dout_row[8 * c + 1]);
        }
        *reinterpret_cast<uint32_t*>(dk_row + 8 * c) = pack_bf16(x[0] * p.scale, x[1] * p.scale);
        *reinterpret_cast<uint32_t*>(dv_row + 8 * c) = pack_bf16(y[0], y[1]);
      }
    }
  }

  __device__ __forceinline__ void release(Mbarrier& empty) {
    __syncwarp();
    if (lane() == 0) empty.arrive();
  }

  Shared& s_;
  const HopperBackwardArguments& x_;
  const int index_;
  const NamedThreads<128> group_;
  RingPlace<Shape::kStages> place_;
  int score_tile_ = 0;  // that was stored last
  uint32_t tile_parity_ = 0;
};

template <typename Shape>
static __global__ void __launch_bounds__(Shape::kThreads, 1)
    stick_key_gradient_hopper_kernel(const __grid_constant__ HopperBackwardArguments x) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char memory[];
  auto& shared = aligned_shared<KeyGradientShared<Shape>>(memory);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  static_assert(kRegistersSuffice<Shape>);
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / 128);
  if (warpgroup == 0) {
    lower_registers<Shape::kProducerRegisters>();
    if (threadIdx.x < 32) KeyGradientProducer<Shape>(shared, x).run();
  } else {
    raise_registers<Shape::kConsumerRegisters>();
    KeyGradientConsumer<Shape>(shared, x, warpgroup - 1).run();
  }
#else
  __trap();  // the build has no code for this GPU: CMAKE_CUDA_ARCHITECTURES lacks 90a
#endif
}

// The number of tiles of queries that a tile of keys walks over.
struct KeySteps {
  StickBreakingProblem p;
  int keys, queries;
  __device__ int operator()(int tile) const {
    const int first = tile * keys;
    const Visibility seen = visibility_of<false>(p, StickHead(p, 0));
    const int end = seen.end_query(min(first + keys, p.tokens) - 1);
    return (end - first + queries - 1) / queries;
  }
};

}  // namespace sbtrain::kernels
