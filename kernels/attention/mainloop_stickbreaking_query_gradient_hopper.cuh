// Phase 1 of the stick-breaking backward pass for sm_90a: dq, and the states from which phase 2
// starts (mainloop_stickbreaking_key_gradient_hopper.cuh). Each consumer owns 64 queries of a tile
// and walks over their blocks of keys from left to right.
#pragma once

#include "kernels/attention/stickbreaking_backward_hopper.cuh"

namespace sbtrain::kernels {

// kFewTiles as in the forward pass.
template <int kHeadDim, bool kFewTiles = false>
struct QueryGradientShape {
  static constexpr int kD = kHeadDim;
  static constexpr int kConsumers = kFewTiles ? 1 : 2;
  static constexpr int kQueries = 64 * kConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kStages = 4;
  // Scores are issued a block ahead, into registers of their own.
  static constexpr bool kAhead = kD <= 64;
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = 240;
};

template <typename Shape>
struct QueryGradientShared {
  static constexpr int kD = Shape::kD, kStages = Shape::kStages;
  alignas(1024) __nv_bfloat16 q[Shape::kQueries * kD];
  alignas(1024) __nv_bfloat16 dout[Shape::kQueries * kD];
  alignas(1024) __nv_bfloat16 k[kStages][kStickKeys * kD];
  alignas(1024) __nv_bfloat16 v[kStages][kStickKeys * kD];
  Mbarrier queries_full, queries_empty, tile_full, tile_empty;
  Mbarrier k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  BackwardTile tile;

  // By one thread.
  __device__ __forceinline__ void init() {
    constexpr int kReaders = 4 * Shape::kConsumers;  // one lane of each warp
    queries_full.init(1);
    queries_empty.init(kReaders);
    tile_full.init(1);
    tile_empty.init(kReaders);
    for (int i = 0; i < kStages; ++i) {
      k_full[i].init(1);
      k_empty[i].init(kReaders);
      v_full[i].init(1);
      v_empty[i].init(kReaders);
    }
    fence_mbarrier_init();
  }
};

template <typename Shape>
class QueryGradientProducer {
  static constexpr int kD = Shape::kD;
  static constexpr int kTileBytes = 2 * kStickKeys * kD;
  using Shared = QueryGradientShared<Shape>;

 public:
  __device__ __forceinline__ QueryGradientProducer(Shared& shared, const HopperBackwardArguments& x)
      : s_(shared), x_(x) {}

  __device__ __forceinline__ void run() {
    for (;;) {
      const BackwardTile tile = take();
      s_.tile_empty.wait(tile_parity_ ^ 1);
      if (lane() == 0) {
        s_.tile = tile;
        s_.tile_full.arrive();
      }
      if (tile.first < 0) return;
      if (lane() == 0) load(tile);
      __syncwarp();
      tile_parity_ ^= 1;
    }
  }

 private:
  // Later rows of a document may have stopped further left than earlier ones.
  __device__ __forceinline__ BackwardTile take() const {
    const QueuedTile next = take_tile_by_warp(x_.queue, tile_parity_ != 0);
    const int tile = next.tile;
    const int head = x_.first_head + next.head;
    if (tile < 0) return {-1, 0, 0, 0};
    const StickHead h(x_.p, head);
    const int first = tile * Shape::kQueries;
    const int end = min(first + Shape::kQueries, x_.p.tokens);
    const Visibility seen = visibility_of<true>(x_.p, h);
    int lowest = INT_MAX;
#pragma unroll 1  // the warp has few registers
    for (int row = first; row < end; row += 64) lowest = min(lowest, seen.first_key(row));
    return {first, head, lowest / kStickKeys * kStickKeys, (end - 1) / kStickKeys * kStickKeys};
  }

  __device__ __forceinline__ void load(const BackwardTile& tile) {
    for (int block = tile.begin; block <= tile.end; block += kStickKeys) {
      const int first = first_loaded_key<kStickKeys>(block, x_.p.tokens);
      load_block(s_.k, s_.k_full, s_.k_empty, x_.k, first, tile.head);
      if (block == tile.begin) load_queries(tile);
      load_block(s_.v, s_.v_full, s_.v_empty, x_.v, first, tile.head);
      place_.advance();
    }
  }
  __device__ __forceinline__ void load_block(__nv_bfloat16 (*stages)[kStickKeys * kD],
                                             Mbarrier* full, Mbarrier* empty,
                                             const CUtensorMap& map, int first, int head) {
    const int stage = place_.stage();
    empty[stage].wait(place_.parity() ^ 1);
    full[stage].arrive_and_expect(kTileBytes);
    load_key_tile<kStickKeys, kD>(stages[stage], map, full[stage], first, head);
  }
  __device__ __forceinline__ void load_queries(const BackwardTile& tile) {
    s_.queries_empty.wait(tile_parity_ ^ 1);
    s_.queries_full.arrive_and_expect(2 * 2 * Shape::kQueries * kD);
    load_token_tile<Shape::kQueries, kD>(s_.q, x_.q, s_.queries_full, tile.first, tile.head);
    load_token_tile<Shape::kQueries, kD>(s_.dout, x_.dout, s_.queries_full, tile.first, tile.head);
  }

  Shared& s_;
  const HopperBackwardArguments& x_;
  RingPlace<Shape::kStages> place_;
  uint32_t tile_parity_ = 0;
};

// Writes the states of the lane's two rows, block by block. They are kept from the first to the
// last block in which the row sees a key.
class StateWriter {
 public:
  __device__ __forceinline__ StateWriter(const HopperBackwardArguments& x, int head, int first,
                                         int block)
      : x_(x), head_(head), first_(first), place_(x.place(block / kStickKeys)) {}
  __device__ __forceinline__ void write(const HopperGradients& sticks, const TileRowKeys& seen,
                                        int block) {
    float2* const rows = x_.states(head_, place_) + first_ + lane_row();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool sees = seen.begin[i] < block + kStickKeys && block < seen.end + 8 * i;
      if (sees && quad_lane() == 0) rows[8 * i] = make_float2(sticks.log2_left[i], sticks.c[i]);
    }
    place_ = place_ + 1 < x_.p.workspace_blocks ? place_ + 1 : 0;
  }

 private:
  const HopperBackwardArguments& x_;
  const int head_, first_;
  int place_;
};

template <typename Shape>
class QueryGradientConsumer {
  static constexpr int kD = Shape::kD;
  using Shared = QueryGradientShared<Shape>;
  using Scores = WarpgroupAccumulator<kStickKeys>;

 public:
  __device__ __forceinline__ QueryGradientConsumer(Shared& shared, const HopperBackwardArguments& x)
      : s_(shared), x_(x) {}

  __device__ __forceinline__ void run() {
    for (;;) {
      s_.tile_full.wait(tile_parity_);
      const BackwardTile tile = {uniform(s_.tile.first), uniform(s_.tile.head),
                                 uniform(s_.tile.begin), uniform(s_.tile.end)};
      release(s_.tile_empty);
      if (tile.first < 0) return;
      compute(tile);
      tile_parity_ ^= 1;
    }
  }

 private:
  __device__ __forceinline__ void compute(const BackwardTile& tile) {
    const StickBreakingProblem& p = x_.p;
    const StickHead head(p, tile.head);
    const int warp = uniform(static_cast<int>(threadIdx.x) / 32) % 4;
    // Looked at again for each tile: as a member it would take a register between them.
    const int index = uniform(static_cast<int>(threadIdx.x) / 128) - 1;
    own_row_ = 64 * index;
    const int first = tile.first + own_row_ + 16 * warp;
    Scores s, dp;
    WarpgroupAccumulator<kD> dq;
    WarpgroupOperand<kStickKeys> dz;
    dq.clear();
    s_.queries_full.wait(tile_parity_);
    issue_scores(s, dp);
    const TileRowKeys seen(visibility_of<true>(p, head), first);
    HopperGradients sticks;
    enter_rows<1>(sticks, p, head, first);
    save_first_keys(tile.head, first, seen);
    wait_for_products<0>();
    s.pin();
    dp.pin();
    release_values();
    StateWriter states(x_, tile.head, first, tile.begin);
    const auto scan = [&](Scores& s, Scores& dp, int block) {
      states.write(sticks, seen, block);
      sticks.score(s, dp, first_loaded_key<kStickKeys>(block, p.tokens), p.scale * kLog2e,
                   BlockKeys{seen, block}, nullptr, nullptr);
    };
    if constexpr (Shape::kAhead) {
      Scores s_2, dp_2;
      for (int block = tile.begin;; block += 2 * kStickKeys) {
        if (block >= tile.end) {
          scan(s, dp, block);
          take_last(dq, dz, dp, block > tile.begin);
          break;
        }
        step_ahead(dq, dz, dp, s_2, dp_2, block > tile.begin, [&] { scan(s, dp, block); });
        const int next = block + kStickKeys;
        if (next >= tile.end) {
          scan(s_2, dp_2, next);
          take_last(dq, dz, dp_2, true);
          break;
        }
        step_ahead(dq, dz, dp_2, s, dp, true, [&] { scan(s_2, dp_2, next); });
      }
    } else {
      for (int block = tile.begin;; block += kStickKeys) {
        scan(s, dp, block);
        take_last(dq, dz, dp, block > tile.begin);
        if (block >= tile.end) break;
        issue_scores(s, dp);
        issue_gradient(dq, dz);
        wait_for_products<1>();
        s.pin();
        dp.pin();
        release_values();
      }
    }
    release(s_.queries_empty);
    issue_gradient(dq, dz);
    wait_for_products<0>();
    dq.pin();
    dz.pin();
    release_keys();
    const float scale = p.scale;
    store_rows(head.row(p.dq, first), p.dq.stride, p.tokens - first, p.head_dim, dq,
               [scale](int) { return scale; });
  }

  // dz of the scanned block becomes the operand. With `pending`, that of the block before is still
  // in use; all that was issued is complete then.
  __device__ __forceinline__ void take_last(WarpgroupAccumulator<kD>& dq,
                                            WarpgroupOperand<kStickKeys>& dz, const Scores& dp,
                                            bool pending) {
    wait_for_products<0>();
    take(dq, dz, dp, pending);
  }
  __device__ __forceinline__ void take(WarpgroupAccumulator<kD>& dq,
                                       WarpgroupOperand<kStickKeys>& dz, const Scores& dp,
                                       bool pending) {
    dq.pin();
    dz.pin();
    if (pending) release_keys();
    round_to_operand(dz, dp);
  }

  // One block that is not the last. The scores of the next one are computed during its scan.
  template <typename Scan>
  __device__ __forceinline__ void step_ahead(WarpgroupAccumulator<kD>& dq,
                                             WarpgroupOperand<kStickKeys>& dz, const Scores& dp,
                                             Scores& next_s, Scores& next_dp, bool pending,
                                             Scan&& scan) {
    issue_scores(next_s, next_dp);
    scan();
    wait_for_products<1>();  // for the gradient of the block before
    take(dq, dz, dp, pending);
    issue_gradient(dq, dz);
    wait_for_products<1>();
    next_s.pin();
    next_dp.pin();
    release_values();
  }

  __device__ __forceinline__ void issue_scores(Scores& s, Scores& dp) {
    const int offset = own_row_ * kPanelCols<kD>;
    const TileOperand<Shape::kQueries, kD, TileUse::kRows> queries(s_.q + offset);
    const TileOperand<Shape::kQueries, kD, TileUse::kRows> douts(s_.dout + offset);
    const int stage = uniform(scored_.stage());
    const TileOperand<kStickKeys, kD, TileUse::kRows> keys(s_.k[stage]), values(s_.v[stage]);
    s_.k_full[stage].wait(scored_.parity());
    s.pin();
    dp.pin();
    wgmma_fence();
    issue_product<kD>(s, queries, keys);
    s_.v_full[stage].wait(scored_.parity());
    wgmma_fence();
    issue_product<kD>(dp, douts, values);
    wgmma_commit();
  }
  // dq += dz k of the oldest block whose keys are not released.
  __device__ __forceinline__ void issue_gradient(WarpgroupAccumulator<kD>& dq,
                                                 WarpgroupOperand<kStickKeys>& dz) {
    dz.pin();
    dq.pin();
    wgmma_fence();
    issue_product<kStickKeys>(
        dq, dz, TileOperand<kStickKeys, kD, TileUse::kColumns>(s_.k[uniform(released_.stage())]));
    wgmma_commit();
  }

  __device__ __forceinline__ void save_first_keys(int head, int first,
                                                  const TileRowKeys& seen) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first + lane_row() + 8 * i;
      if (quad_lane() == 0 && row < x_.p.tokens) *x_.first_key(head, row) = seen.begin[i];
    }
  }
  __device__ __forceinline__ void release(Mbarrier& empty) {
    __syncwarp();
    if (lane() == 0) empty.arrive();
  }
  __device__ __forceinline__ void release_keys() {
    release(s_.k_empty[released_.stage()]);
    released_.advance();
  }
  __device__ __forceinline__ void release_values() {
    release(s_.v_empty[scored_.stage()]);
    scored_.advance();
  }

  Shared& s_;
  const HopperBackwardArguments& x_;
  int own_row_ = 0;  // of the tile, the consumer's first one
  RingPlace<Shape::kStages> scored_, released_;
  uint32_t tile_parity_ = 0;
};

template <typename Shape>
static __global__ void __launch_bounds__(Shape::kThreads, 1)
    stick_query_gradient_hopper_kernel(const __grid_constant__ HopperBackwardArguments x) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char memory[];
  auto& shared = aligned_shared<QueryGradientShared<Shape>>(memory);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  static_assert(kRegistersSuffice<Shape>);
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / 128);
  if (warpgroup == 0) {
    lower_registers<Shape::kProducerRegisters>();
    if (threadIdx.x < 32) QueryGradientProducer<Shape>(shared, x).run();
  } else {
    raise_registers<Shape::kConsumerRegisters>();
    QueryGradientConsumer<Shape>(shared, x).run();
  }
#else
  __trap();  // the build has no code for this GPU: CMAKE_CUDA_ARCHITECTURES lacks 90a
#endif
}

}  // namespace sbtrain::kernels
