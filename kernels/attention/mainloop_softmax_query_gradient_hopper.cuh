// Phase 1 of the softmax backward pass for sm_90a: dq, as mainloop_softmax_backward.cuh says, with
// the correction of delta where the score function asks for it. Each consumer owns 64 queries of a
// tile and walks over their blocks of keys from left to right; the structure is that of
// mainloop_stickbreaking_query_gradient_hopper.cuh.
#pragma once

#include "kernels/attention/mainloop_softmax_backward.cuh"
#include "kernels/attention/softmax_tiles_hopper.cuh"

namespace sbtrain::kernels {

template <int kHeadDim, int kWarpgroups>
struct HopperSoftmaxQueryTiles {
  static constexpr int kD = kHeadDim;
  static constexpr int kRowBlocks = 1;  // of 16 queries, each warp
  static constexpr int kKeys = 64;
  static constexpr int kConsumers = kWarpgroups;
  static constexpr int kQueries = 64 * kConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kStages = 4;
};
// Narrow heads leave registers for a third consumer, unless the score takes them.
template <int kHeadDim, typename Policy>
using HopperSoftmaxQueryTilesOf =
    HopperSoftmaxQueryTiles<kHeadDim, (kHeadDim <= 64 && !kStagesScores<Policy>) ? 3 : 2>;

template <int kHeadDim, typename Policy>
struct HopperSoftmaxQueryShape : HopperSoftmaxQueryTilesOf<kHeadDim, Policy> {
  using Tiles = HopperSoftmaxQueryTilesOf<kHeadDim, Policy>;
  using Scores = typename Policy::template QueryRows<Tiles>;
  static constexpr bool kStaged = kStagesScores<Policy>;
  static constexpr int kProducerRegisters = kStaged ? 40 : 24;
  static constexpr int kConsumerRegisters = Tiles::kConsumers == 3 ? 160 : kStaged ? 232 : 240;
};

template <typename Shape>
struct HopperSoftmaxQueryShared {
  static constexpr int kD = Shape::kD, kKeys = Shape::kKeys, kStages = Shape::kStages;
  alignas(1024) __nv_bfloat16 q[Shape::kQueries * kD];
  alignas(1024) __nv_bfloat16 dout[Shape::kQueries * kD];
  alignas(1024) __nv_bfloat16 k[kStages][kKeys * kD];
  alignas(1024) __nv_bfloat16 v[kStages][kKeys * kD];
  alignas(16) unsigned char staged[kStages][Shape::kStaged ? Shape::Scores::stage_bytes() : 16];
  Mbarrier queries_full, queries_empty, tile_full, tile_empty;
  Mbarrier k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  SoftmaxTile tile;

  // By one thread.
  __device__ __forceinline__ void init() {
    constexpr int kReaders = 4 * Shape::kConsumers;  // one lane of each warp
    queries_full.init(1);
    queries_empty.init(kReaders);
    tile_full.init(1);
    tile_empty.init(kReaders);
    for (int i = 0; i < kStages; ++i) {
      k_full[i].init(Shape::kStaged ? 1 + 32 : 1);
      k_empty[i].init(kReaders);
      v_full[i].init(1);
      v_empty[i].init(kReaders);
    }
    fence_mbarrier_init();
  }
};

// ---- The warp that loads ------------------------------------------------------------------------

template <typename Shape, typename Policy>
class HopperSoftmaxQueryProducer {
  static constexpr int kD = Shape::kD, kKeys = Shape::kKeys;
  static constexpr int kTileBytes = 2 * kKeys * kD;
  using Scores = typename Shape::Scores;
  using Shared = HopperSoftmaxQueryShared<Shape>;
  using Arguments = HopperSoftmaxArguments<Policy>;

 public:
  __device__ __forceinline__ HopperSoftmaxQueryProducer(Shared& shared, const Arguments& x)
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
    for (int block = tile.begin; block <= tile.last; block += kKeys) {
      load_keys(scores, tile, block);
      if (block == tile.begin) load_queries(tile);
      load_values(tile, block);
      place_.advance();
    }
  }
  // The numbers of the score function come with the keys.
  __device__ __forceinline__ void load_keys(Scores& scores, const SoftmaxTile& tile, int block) {
    const int stage = place_.stage();
    Mbarrier& full = s_.k_full[stage];
    s_.k_empty[stage].wait(place_.parity() ^ 1);
    if constexpr (Shape::kStaged) {
      scores.load(BlockThreads<32>(), s_.staged[stage], block);
      full.arrive_after_copies();
    }
    if (lane() != 0) return;
    full.arrive_and_expect(kTileBytes);
    load_token_tile<kKeys, kD>(s_.k[stage], x_.k, full, block, tile.head);
  }
  __device__ __forceinline__ void load_queries(const SoftmaxTile& tile) {
    s_.queries_empty.wait(tile_parity_ ^ 1);
    if (lane() != 0) return;
    s_.queries_full.arrive_and_expect(2 * 2 * Shape::kQueries * kD);
    load_token_tile<Shape::kQueries, kD>(s_.q, x_.q, s_.queries_full, tile.first, tile.head);
    load_token_tile<Shape::kQueries, kD>(s_.dout, x_.dout, s_.queries_full, tile.first, tile.head);
  }
  __device__ __forceinline__ void load_values(const SoftmaxTile& tile, int block) {
    const int stage = place_.stage();
    s_.v_empty[stage].wait(place_.parity() ^ 1);
    if (lane() != 0) return;
    s_.v_full[stage].arrive_and_expect(kTileBytes);
    load_token_tile<kKeys, kD>(s_.v[stage], x_.v, s_.v_full[stage], block, tile.head);
  }

  Shared& s_;
  const Arguments& x_;
  RingPlace<Shape::kStages> place_;
  uint32_t tile_parity_ = 0;
};

// ---- The warpgroups that compute ----------------------------------------------------------------

template <typename Shape, typename Policy>
class HopperSoftmaxQueryConsumer {
  static constexpr int kD = Shape::kD, kKeys = Shape::kKeys;
  using Scores = typename Shape::Scores;
  using Shared = HopperSoftmaxQueryShared<Shape>;
  using Arguments = HopperSoftmaxArguments<Policy>;
  using Tile = WarpgroupAccumulator<kKeys>;

 public:
  __device__ __forceinline__ HopperSoftmaxQueryConsumer(Shared& shared, const Arguments& x,
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
  // What is known of the lane's two rows.
  struct Rows {
    float lse_log2[2], delta[2];
    float residual[2] = {0.0f, 0.0f};  // sums of the rows of dS
  };

  __device__ __forceinline__ void compute(const SoftmaxTile& tile) {
    const SoftmaxProblem& p = x_.p;
    const SoftmaxHead head(p, tile.head);
    const int warp = uniform(static_cast<int>(threadIdx.x) / 32) % 4;
    const int warp_row = 64 * index_ + 16 * warp;
    const int first = tile.first + warp_row;
    const SoftmaxTile mine = tile_of_queries<64, kKeys>(p, tile.first + 64 * index_, tile.head);
    const int begin = uniform(mine.begin), last = uniform(mine.last);
    for (int block = tile.begin; block < begin; block += kKeys) pass_over();
    Tile s, dp;
    WarpgroupAccumulator<kD> dq;
    WarpgroupOperand<kKeys> ds;
    dq.clear();
    s_.queries_full.wait(tile_parity_);
    issue_scores(s, dp);
    const TileRowKeys seen(visibility_of(p), first);
    Rows rows = enter_rows(head, first);
    Scores scores(x_.policy, {tile.head, tile.first, warp_row});
    wait_for_products<0>();
    s.pin();
    dp.pin();
    release_values();
    for (int block = begin;; block += kKeys) {
      to_gradients(s, dp, scores, rows, seen, block);
      wait_for_products<0>();
      dq.pin();
      ds.pin();
      if (block > begin) release_keys();
      round_to_operand(ds, dp);
      if (block >= last) break;
      issue_scores(s, dp);
      issue_gradient(dq, ds);
      wait_for_products<1>();
      s.pin();
      dp.pin();
      release_values();
    }
    release(s_.queries_empty);
    issue_gradient(dq, ds);
    if constexpr (Policy::kExactDelta) correct(head, first, rows);
    wait_for_products<0>();
    dq.pin();
    ds.pin();
    release_keys();
    for (int block = last; block < tile.last; block += kKeys) pass_over();
    const float scale = p.scale;
    store_rows(head.row(p.dq, first), p.dq.stride, p.tokens - first, p.head_dim, dq,
               [scale](int) { return scale; });
  }

  // Leaves out a block that only other consumers' queries see.
  __device__ __forceinline__ void pass_over() {
    s_.k_full[scored_.stage()].wait(scored_.parity());
    s_.v_full[scored_.stage()].wait(scored_.parity());
    release_values();
    release_keys();
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
    scores.enter(staged, block);
    scores.score(s);
    s.for_each([&](float& x, auto at) { x = exp2_ftz(x - rows.lse_log2[at.lane_row]); });
    mask(s, seen, block, 0.0f);
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

  __device__ __forceinline__ void issue_scores(Tile& s, Tile& dp) {
    const int offset = 64 * index_ * kPanelCols<kD>;
    const TileOperand<Shape::kQueries, kD, TileUse::kRows> queries(s_.q + offset);
    const TileOperand<Shape::kQueries, kD, TileUse::kRows> douts(s_.dout + offset);
    const int stage = uniform(scored_.stage());
    const TileOperand<kKeys, kD, TileUse::kRows> keys(s_.k[stage]), values(s_.v[stage]);
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
  // dq += dS k of the oldest block whose keys are not released.
  __device__ __forceinline__ void issue_gradient(WarpgroupAccumulator<kD>& dq,
                                                 WarpgroupOperand<kKeys>& ds) {
    ds.pin();
    dq.pin();
    wgmma_fence();
    issue_product<kKeys>(
        dq, ds, TileOperand<kKeys, kD, TileUse::kColumns>(s_.k[uniform(released_.stage())]));
    wgmma_commit();
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
  const Arguments& x_;
  const int index_;
  RingPlace<Shape::kStages> scored_, released_, staged_;
  uint32_t tile_parity_ = 0;
};

// ---- The kernel ---------------------------------------------------------------------------------

template <typename Shape, typename Policy>
static __global__ void __launch_bounds__(Shape::kThreads, 1)
    softmax_query_gradient_hopper_kernel(const __grid_constant__ HopperSoftmaxArguments<Policy> x) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char memory[];
  auto& shared = aligned_shared<HopperSoftmaxQueryShared<Shape>>(memory);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  static_assert(kRegistersSuffice<Shape>);
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / 128);
  if (warpgroup == 0) {
    lower_registers<Shape::kProducerRegisters>();
    if (threadIdx.x < 32) HopperSoftmaxQueryProducer<Shape, Policy>(shared, x).run();
  } else {
    raise_registers<Shape::kConsumerRegisters>();
    HopperSoftmaxQueryConsumer<Shape, Policy>(shared, x, warpgroup - 1).run();
  }
#else
  __trap();  // the build has no code for this GPU: CMAKE_CUDA_ARCHITECTURES lacks 90a
#endif
}

}  // namespace sbtrain::kernels
