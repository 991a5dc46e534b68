// Phase 1 of the stick-breaking backward pass for sm_90a: dq, and the states from which phase 2
// starts (mainloop_stickbreaking_key_gradient_hopper.cuh). Each consumer owns 64 queries of a tile
// and walks over their blocks of keys from left to right.
#pragma once

#include "kernels/attention/products_hopper.cuh"
#include "kernels/attention/stickbreaking_backward_hopper.cuh"

namespace sbtrain::kernels {

// kFewTiles as in the forward pass; kInSegments: of queries and keys (HopperSegments).
template <int kHeadDim, bool kFewTiles = false, bool kInSegments = false>
struct QueryGradientShape {
  static constexpr int kD = kHeadDim;
  static constexpr bool kSegments = kInSegments;
  static constexpr bool kFolded = false;
  static constexpr bool kGated = false;
  static constexpr bool kFar = false;
  static constexpr int kConsumers = kFewTiles ? 1 : 2;
  static constexpr int kQueries = 64 * kConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kStages = 4;
  // Scores are issued a block ahead, into registers of their own.
  static constexpr bool kAhead = kD <= 64;
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = 240;
};

struct QueryGradientTile : QueryTile {
  int parts = 0;  // TileParts
};
__device__ __forceinline__ QueryGradientTile uniform(const QueryGradientTile& tile) {
  return {uniform(static_cast<const QueryTile&>(tile)), uniform(tile.parts)};
}

template <typename Shape>
struct QueryGradientShared {
  static constexpr int kD = Shape::kD, kStages = Shape::kStages;
  alignas(1024) __nv_bfloat16 q[Shape::kQueries * kD];
  alignas(1024) __nv_bfloat16 dout[Shape::kQueries * kD];
  alignas(1024) __nv_bfloat16 k[kStages][kStickKeys * kD];
  alignas(1024) __nv_bfloat16 v[kStages][kStickKeys * kD];
  Pipeline<1> queries, tiles;
  Pipeline<kStages> keys, values;
  QueryGradientTile tile;
  GateBuffers<Shape::kGated, kStages> gates;                     // they come with the keys
  uint32_t parities[Shape::kGated ? 4 * Shape::kConsumers : 1];  // of each warp's TileState

  __device__ __forceinline__ void init() {
    queries.init(1, kReaders<Shape>);
    tiles.init(1, kReaders<Shape>);
    keys.init(1, kReaders<Shape>);
    values.init(1, kReaders<Shape>);
    if constexpr (Shape::kGated) {
      for (uint32_t& parity : parities) parity = 0;
    }
  }
};

template <typename Shape>
class QueryGradientProducer : public TileState {
  static constexpr int kD = Shape::kD;
  static constexpr int kTileBytes = 2 * kStickKeys * kD;
  using Shared = QueryGradientShared<Shape>;

 public:
  __device__ __forceinline__ QueryGradientProducer(Shared& shared, const HopperBackwardArguments& x)
      : s_(shared), x_(x) {}

  // Later rows of a document may have stopped further left than earlier ones.
  __device__ __forceinline__ QueryGradientTile tile_of(int tile, int scheduled_head) const {
    const int head = x_.first_head + scheduled_head;
    const int first =
        (Shape::kSegments || Shape::kFar ? x_.part.first_query : 0) + tile * Shape::kQueries;
    const int end = min(first + Shape::kQueries, x_.p.tokens);
    const Visibility seen = visibility_of<true, Shape::kFar>(x_.p, StickHead(x_.p, head));
    int lowest = INT_MAX;
#pragma unroll 1  // the warp has few registers
    for (int row = first; row < end; row += 64) lowest = min(lowest, seen.first_key(row));
    const int begin = lowest / kStickKeys * kStickKeys;
    const int last = (end_key_of_rows<Shape::kFar>(x_.p, end) - 1) / kStickKeys * kStickKeys;
    // Where the sticks were used up before they came here, one block is looked at nevertheless.
    if constexpr (Shape::kFar) return {{first, head, min(begin, last), last}};
    if constexpr (!Shape::kSegments) return {{first, head, begin, last}};
    const QueryTile part = {first, head, max(begin, x_.part.first_key),
                            min(last, x_.part.end_key - kStickKeys)};
    if (part.begin > part.last) return {part, TileParts::kNone};
    return {part, (begin < x_.part.first_key ? TileParts::kBegun : 0) |
                      (last >= x_.part.end_key ? TileParts::kMore : 0)};
  }
  __device__ __forceinline__ void load(const QueryGradientTile& tile) {
    if (lane() == 0) load_by_one_thread(tile);
    __syncwarp();
  }

 private:
  __device__ __forceinline__ void load_by_one_thread(const QueryGradientTile& tile) {
    if (Shape::kSegments && tile.parts == TileParts::kNone) {
      s_.queries.acquire(tile_state()).arrive();
    }
    const int key_head = tile.head / x_.p.group;
    for (int block = tile.begin; block <= tile.last; block += kStickKeys) {
      const int first = first_loaded_key<kStickKeys>(block, x_.p.tokens);
      load_block(s_.k, s_.keys, x_.k, first, key_head, Shape::kGated ? sizeof(KeyGates) : 0);
      if constexpr (Shape::kGated) load_gates(tile.head, block);
      if (block == tile.begin) load_queries(tile);
      load_block(s_.v, s_.values, x_.v, first, key_head);
      state_.advance();
    }
  }
  __device__ __forceinline__ void load_block(__nv_bfloat16 (*stages)[kStickKeys * kD],
                                             Pipeline<Shape::kStages>& pipeline,
                                             const CUtensorMap& map, int first, int head,
                                             int more_bytes = 0) {
    Mbarrier& full = pipeline.acquire(state_);
    full.arrive_and_expect(kTileBytes + more_bytes);
    load_key_tile<kStickKeys, kD>(stages[state_.stage()], map, full, first, head);
  }
  __device__ __forceinline__ void load_gates(int head, int block) {
    const int stage = state_.stage();
    bulk_load(&s_.gates.keys[stage], x_.gates_of(head, block), sizeof(KeyGates),
              s_.keys.full[stage]);
  }
  __device__ __forceinline__ void load_queries(const QueryTile& tile) {
    Mbarrier& full = s_.queries.acquire(tile_state());
    full.arrive_and_expect(2 * 2 * Shape::kQueries * kD);
    load_token_tile<Shape::kQueries, kD>(s_.q, x_.q, full, tile.first, tile.head);
    load_token_tile<Shape::kQueries, kD>(s_.dout, x_.dout, full, tile.first, tile.head);
  }

  Shared& s_;
  const HopperBackwardArguments& x_;
  PipelineState<Shape::kStages> state_;
};

// Writes the lane's states of its two rows, block by block. They are kept from the first to the
// last block in which the row sees a key.
class StateWriter {
 public:
  // The rows are the warpgroup's, from `first` on; the first block of keys is `block`.
  __device__ __forceinline__ StateWriter(const HopperBackwardArguments& x, int head, int first,
                                         int block)
      : at_first_place_(&x.states(head, 0, first)->of_row[0][threadIdx.x % 128]),
        stride_(static_cast<int>(sizeof(TileStates) / sizeof(State)) * (x.state_rows / 64)),
        end_(x.p.workspace_blocks * stride_),
        place_(x.place(block / kStickKeys) * stride_) {}
  __device__ __forceinline__ void write(int i, const HopperGradients::LaneState& state,
                                        const TileRowKeys& seen, int block) const {
    const bool sees = seen.begin[i] < block + kStickKeys && block < seen.end + 8 * i;
    if (sees) at_first_place_[place_ + 128 * i] = state;
  }
  __device__ __forceinline__ void advance() {
    place_ += stride_;
    if (place_ == end_) place_ = 0;
  }

 private:
  using State = HopperGradients::LaneState;
  State* const at_first_place_;
  const int stride_, end_;  // of the places, counted in states
  int place_;
};

template <typename Shape>
class QueryGradientConsumer : public TileState {
  static constexpr int kD = Shape::kD;
  using Shared = QueryGradientShared<Shape>;
  using Scores = WarpgroupAccumulator<kStickKeys>;

 public:
  __device__ __forceinline__ QueryGradientConsumer(Shared& shared, const HopperBackwardArguments& x,
                                                   int)
      : s_(shared), x_(x) {}

  // With gates there is no register for it.
  __device__ __forceinline__ PipelineState<1> tile_state() const {
    if constexpr (!Shape::kGated) return TileState::tile_state();
    return {static_cast<uint32_t>(uniform(static_cast<int>(my_parity())))};
  }
  __device__ __forceinline__ void advance_tile() {
    if constexpr (!Shape::kGated) return TileState::advance_tile();
    if (lane() == 0) my_parity() ^= 1;
    __syncwarp();
  }

  __device__ __forceinline__ void compute(const QueryGradientTile& tile) {
    const StickBreakingProblem& p = x_.p;
    const StickHead head(p, tile.head);
    const int warp = uniform(static_cast<int>(threadIdx.x) / 32) % 4;
    // Looked at again for each tile: as a member it would take a register between them.
    const int index = uniform(static_cast<int>(threadIdx.x) / 128) - 1;
    own_row_ = 64 * index;
    const int first = tile.first + own_row_ + 16 * warp;
    if (Shape::kSegments && tile.parts == TileParts::kNone) return pass_over(head, first);
    Scores s, dp;
    WarpgroupAccumulator<kD> dq;
    WarpgroupOperand<kStickKeys> dz;
    if constexpr (Shape::kSegments) {
      load_sums(dq, sums_of(first));
    } else {
      dq.clear();
    }
    s_.queries.wait(tile_state());
    issue_scores<Shape>(s_, scored_, own_row_, s, dp);
    const TileRowKeys seen(visibility_of<true, Shape::kFar>(p, head), first);
    HopperGradients sticks;
    if (Shape::kSegments && (tile.parts & TileParts::kBegun) != 0) {
      resume(sticks, first);
    } else {
      enter_rows<1, Shape::kFar>(sticks, p, head, first);
    }
    save_first_keys(tile.head, first, seen);
    wait_for_products<0>();
    s.pin();
    dp.pin();
    s_.values.release_and_advance(scored_);
    StateWriter states(x_, tile.head, tile.first + own_row_, tile.begin);
    const auto scan = [&](Scores& s, Scores& dp, int block) {
      sticks.score(s, dp, first_loaded_key<kStickKeys>(block, p.tokens), score_scale<Shape>(p),
                   BlockKeys{seen, block}, gates_in(s_.gates, scanned_stage()),
                   [&](int i, const auto& state) { states.write(i, state, seen, block); });
      states.advance();
    };
    if constexpr (Shape::kAhead) {
      Scores s_2, dp_2;
      for (int block = tile.begin;; block += 2 * kStickKeys) {
        if (block >= tile.last) {
          scan(s, dp, block);
          take_last(dq, dz, dp, block > tile.begin);
          break;
        }
        step_ahead(dq, dz, dp, s_2, dp_2, block > tile.begin, [&] { scan(s, dp, block); });
        const int next = block + kStickKeys;
        if (next >= tile.last) {
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
        if (block >= tile.last) break;
        issue_scores<Shape>(s_, scored_, own_row_, s, dp);
        issue_query_gradient<Shape>(s_, released_, dq, dz);
        wait_for_products<1>();
        s.pin();
        dp.pin();
        s_.values.release_and_advance(scored_);
      }
    }
    s_.queries.release();
    issue_query_gradient<Shape>(s_, released_, dq, dz);
    wait_for_products<0>();
    dq.pin();
    dz.pin();
    s_.keys.release_and_advance(released_);
    if (Shape::kSegments && (tile.parts & TileParts::kMore) != 0) return suspend(sticks, dq, first);
    const float scale = p.scale * p.query_factor;
    const auto scaled = [scale](int) { return scale; };
    if constexpr (Shape::kFar) {
      // What no key was read for stays as it is. The first row of a tile is as any other.
      if (visibility_of<true, true>(p, head).first_key(first) < p.tokens) {
        add_rows(sum_row(head, p.far.dq, first), p.far.dq.stride, p.far.queries - first, p.head_dim,
                 dq, scaled);
      }
      leave_rows(sticks, p, head, first);
    } else {
      store_rows(head.row(p.dq, first), p.dq.stride, p.tokens - first, p.head_dim, dq, scaled);
    }
  }

 private:
  __device__ __forceinline__ uint32_t& my_parity() const {
    return s_.parities[threadIdx.x / 32 - 4];  // the first four warps load
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
    if (pending) s_.keys.release_and_advance(released_);
    round_to_operand(dz, dp);
  }

  // Of the block that is scanned, whose scores were the last that were waited for.
  __device__ __forceinline__ int scanned_stage() const {
    return (scored_.stage() + Shape::kStages - 1) % Shape::kStages;
  }

  // One block that is not the last. The scores of the next one are computed during its scan.
  template <typename Scan>
  __device__ __forceinline__ void step_ahead(WarpgroupAccumulator<kD>& dq,
                                             WarpgroupOperand<kStickKeys>& dz, const Scores& dp,
                                             Scores& next_s, Scores& next_dp, bool pending,
                                             Scan&& scan) {
    issue_scores<Shape>(s_, scored_, own_row_, next_s, next_dp);
    scan();
    wait_for_products<1>();  // for the gradient of the block before
    take(dq, dz, dp, pending);
    issue_query_gradient<Shape>(s_, released_, dq, dz);
    wait_for_products<1>();
    next_s.pin();
    next_dp.pin();
    s_.values.release_and_advance(scored_);
  }

  // Of a tile that sees no key of the segment phase 2 reads the first keys nevertheless.
  __device__ __forceinline__ void pass_over(const StickHead& head, int first) {
    s_.queries.wait(tile_state());
    s_.queries.release();
    save_first_keys(head.index, first, TileRowKeys(visibility_of<true>(x_.p, head), first));
  }
  // Of the warp's rows, from `first` on.
  __device__ __forceinline__ float* sums_of(int first) const {
    return x_.part.dq + int64_t{first} * kD;
  }
  // Where the segment of keys before ended.
  __device__ __forceinline__ void resume(HopperGradients& sticks, int first) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 carry = x_.part.carries[first + lane_row() + 8 * i];
      sticks.log2_left[i] = carry.x;
      sticks.c[i] = carry.y;
    }
  }
  __device__ __forceinline__ void suspend(const HopperGradients& sticks,
                                          const WarpgroupAccumulator<kD>& dq, int first) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (quad_lane() != 0) continue;
      x_.part.carries[first + lane_row() + 8 * i] = make_float2(sticks.log2_left[i], sticks.c[i]);
    }
    save_sums(sums_of(first), dq);
  }

  __device__ __forceinline__ void save_first_keys(int head, int first,
                                                  const TileRowKeys& seen) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first + lane_row() + 8 * i;
      if (quad_lane() == 0 && row < x_.p.tokens) *x_.first_key(head, row) = seen.begin[i];
    }
  }

  Shared& s_;
  const HopperBackwardArguments& x_;
  int own_row_ = 0;  // of the tile, the consumer's first one
  PipelineState<Shape::kStages> scored_, released_;
};

// The number of blocks of keys of the segment that a tile of queries walks over.
template <bool kFar = false>
struct QueryGradientSteps {
  StickBreakingProblem p;
  HopperSegments part;
  int queries;
  __device__ int operator()(int tile) const {
    const int first = part.first_query + tile * queries;
    const int lowest = visibility_of<false, kFar>(p, StickHead(p, 0)).first_key(first);
    const int last = end_key_of_rows<kFar>(p, first + queries) - 1;
    const int begin = max(lowest / kStickKeys, part.first_key / kStickKeys);
    return max(1, min(last / kStickKeys, part.end_key / kStickKeys - 1) - begin + 1);
  }
};

template <typename Tiles>
struct StickQueryGradientMainloop {
  using Shape = Tiles;
  using Arguments = HopperBackwardArguments;
  using Shared = QueryGradientShared<Shape>;
  using Producer = QueryGradientProducer<Shape>;
  using Consumer = QueryGradientConsumer<Shape>;
  static constexpr int kTileRows = Shape::kQueries;
  static __device__ __forceinline__ bool needed(const Arguments& x) requires(Shape::kSegments) {
    return segment_is_needed(x.part);
  }
  static QueryGradientSteps<Shape::kFar> steps(const Arguments& x) {
    return {x.p, x.part, Shape::kQueries};
  }
};

}  // namespace sbtrain::kernels
