// Phase 2 of the stick-breaking backward pass for sm_90a: dk and dv, from the states that phase 1
// left (mainloop_stickbreaking_query_gradient_hopper.cuh). Each consumer owns 64 keys of a tile and
// walks over the tiles of queries that see them, of one head of the group after the other.
#pragma once

#include "kernels/attention/gate_sums_hopper.cuh"

namespace sbtrain::kernels {

// Writes dgate of a block of the segment's keys, for each block and head of keys of the launch,
// from the sums that its last segment of queries left.
static __global__ void __launch_bounds__(kStickKeys)
    write_gate_gradients_kernel(const HopperBackwardArguments x) {
  const int block = static_cast<int>(blockIdx.x), n = static_cast<int>(threadIdx.x);
  const int key_head = x.first_head / x.p.group + static_cast<int>(blockIdx.y);
  const GateSums* const sums = x.gate_sums(key_head, block * kStickKeys);
  write_gate_gradient(x.p, x.member_of(key_head), x.part.first_key + block * kStickKeys, n, sums);
}

// Each consumer owns 64 keys of a tile. They share the queries and work apart otherwise. kFewTiles
// and kInSegments as in phase 1.
template <int kHeadDim, bool kFewTiles = false, bool kInSegments = false>
struct KeyGradientShape {
  static constexpr int kD = kHeadDim;
  static constexpr bool kSegments = kInSegments;
  static constexpr bool kFolded = false;
  static constexpr bool kGated = false;
  static constexpr bool kFar = false;
  // Of three consumers, each thread has 160 registers. That is enough for narrow heads, if one of
  // its rows of scores becomes gradients after the other.
  static constexpr bool kRowByRow = kD <= 64 && !kFewTiles;
  static constexpr int kConsumers = kFewTiles ? 1 : kRowByRow ? 3 : 2;
  static constexpr int kKeys = 64 * kConsumers;
  static constexpr int kQueries = 64;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kStages = kD <= 32 ? 4 : 3;
  // Where shared memory is left for it, A and dz are stored beside those of the tile before, which
  // the tensor cores may still read.
  static constexpr int kScoreTiles = kD <= 64 ? 2 : 1;
  static constexpr int kProducerRegisters = kRowByRow ? 32 : 40;
  static constexpr int kConsumerRegisters = kRowByRow ? 160 : 232;
};

// What a warp that computes has no register for.
struct WarpTile {
  int head, parts;
  uint32_t parity;  // of the phase of the barriers in which the tile of keys comes
};

struct KeyGradientTile : KeyTile {
  int parts = 0;  // TileParts
};
__device__ __forceinline__ KeyGradientTile uniform(const KeyGradientTile& tile) {
  return {uniform(static_cast<const KeyTile&>(tile)), uniform(tile.parts)};
}

template <typename Shape>
struct KeyGradientShared {
  static constexpr int kD = Shape::kD, kStages = Shape::kStages, kConsumers = Shape::kConsumers;
  alignas(1024) __nv_bfloat16 k[kConsumers][kStickKeys * kD];
  alignas(1024) __nv_bfloat16 v[kConsumers][kStickKeys * kD];
  alignas(1024) __nv_bfloat16 q[kStages][Shape::kQueries * kD];
  alignas(1024) __nv_bfloat16 dout[kStages][Shape::kQueries * kD];
  alignas(1024) __nv_bfloat16 a[Shape::kScoreTiles][kConsumers][Shape::kQueries * kStickKeys];
  alignas(1024) __nv_bfloat16 dz[Shape::kScoreTiles][kConsumers][Shape::kQueries * kStickKeys];
  TileStates states[kStages][kConsumers];
  alignas(16) int first_keys[kStages][Shape::kQueries];
  int first_query[kStages];  // < 0: there are no more queries for this tile
  Pipeline<1> keys, tiles;
  Pipeline<kStages> queries;
  KeyGradientTile tile;
  WarpTile warps[4 * kConsumers];
  uint32_t producer_parity;  // the same for the warp that loads
  int query_head;            // whose queries it loads
  GateBuffers<Shape::kGated, kConsumers> gates;
  GateSumBuffers<Shape::kGated, kConsumers> gate_sums;

  __device__ __forceinline__ void init() {
    keys.init(1, kReaders<Shape>);
    tiles.init(1, kReaders<Shape>);
    queries.init(1, kReaders<Shape>);
    for (WarpTile& warp : warps) warp.parity = 0;
    producer_parity = 0;
  }
};

template <typename Shape>
class KeyGradientProducer {
  static constexpr int kD = Shape::kD;
  using Shared = KeyGradientShared<Shape>;
  // Of a tile of queries: their first keys, and their states in the blocks of all consumers.
  static constexpr int kRowBytes = sizeof(Shared::first_keys[0]) + sizeof(Shared::states[0]);

 public:
  __device__ __forceinline__ KeyGradientProducer(Shared& shared, const HopperBackwardArguments& x)
      : s_(shared), x_(x) {
    load_queries(-1, 0, 0);  // the consumers begin as if they had passed a tile
  }

  // In place of TileState, which would take a register.
  __device__ __forceinline__ PipelineState<1> tile_state() const { return {s_.producer_parity}; }
  __device__ __forceinline__ void advance_tile() {
    if (lane() == 0) s_.producer_parity ^= 1;
    __syncwarp();
  }

  __device__ __forceinline__ KeyGradientTile tile_of(int tile, int scheduled_head) const {
    const int head = x_.first_head / x_.p.group + scheduled_head;
    if constexpr (Shape::kFar) {
      return {{(x_.p.far.key / Shape::kKeys + tile) * Shape::kKeys, head}};
    }
    if constexpr (!Shape::kSegments) return {{tile * Shape::kKeys, head}};
    const int first = x_.part.first_key + tile * Shape::kKeys;
    return {{first, head}, parts_of(first)};
  }
  __device__ __forceinline__ void load(const KeyGradientTile& tile) {
    __syncwarp();
    if constexpr (Shape::kProducerRegisters < 40) {
      load(s_.tile.first, s_.tile.head);  // read again where they are used
    } else {
      load(tile.first, tile.head);
    }
    __syncwarp();
  }

 private:
  __device__ __forceinline__ int parts_of(int first) const {
    const int end = visibility_of<false>(x_.p, StickHead(x_.p, 0))
                        .end_query(min(first + Shape::kKeys, x_.p.tokens) - 1);
    if (end <= x_.part.first_query) return TileParts::kNone;
    return end > x_.part.end_query ? TileParts::kMore : 0;
  }
  // Segments are of one head of queries of each group, which the launch names.
  __device__ __forceinline__ void load(const int& block, const int& head) {
    load_keys(block, head);
    const int heads = Shape::kSegments ? 1 : x_.p.group;
#pragma unroll 1
    for (int n = 0; n < heads; ++n) {
      if (lane() == 0) {
        s_.query_head = Shape::kSegments ? x_.member_of(head) : head * x_.p.group + n;
      }
      __syncwarp();
      load_head(block, s_.query_head);
      __syncwarp();
    }
    load_queries(-1, block, head);
  }
  __device__ __forceinline__ void load_head(const int& block, const int& head) {
    const StickBreakingProblem& p = x_.p;
    const Visibility seen = visibility_of<false, Shape::kFar>(p, StickHead(p, 0));
    const int end_key = min(block + Shape::kKeys, p.tokens);
    int end = seen.end_query(end_key - 1);
    int begin = Shape::kFar ? x_.part.first_query : block;
    if constexpr (Shape::kSegments) {
      begin = max(begin, x_.part.first_query);
      end = min(end, x_.part.end_query);
    }
    for (int some = begin; some < end; some += 32 * Shape::kQueries) {
      // The first row of a tile is the one that sees furthest to the left.
      const int mine = some + lane() * Shape::kQueries;
      const bool needed =
          mine < end && (p.skip_epsilon == 0 || *x_.first_key(head, mine) < end_key);
      for (unsigned tiles = __ballot_sync(~0u, needed); tiles; tiles &= tiles - 1) {
        load_queries(some + (__ffs(static_cast<int>(tiles)) - 1) * Shape::kQueries, block, head);
      }
    }
  }
  __device__ __forceinline__ void load_keys(const int& block, const int& head) {
    Mbarrier& full = s_.keys.acquire(tile_state());
    if (lane() != 0) return;
    constexpr int kGateBytes = Shape::kGated ? Shape::kConsumers * sizeof(KeyGates) : 0;
    full.arrive_and_expect(2 * 2 * Shape::kKeys * kD + kGateBytes);
    for (int i = 0; i < Shape::kConsumers; ++i) {
      const int first = first_loaded_key<kStickKeys>(block + i * kStickKeys, x_.p.tokens);
      load_key_tile<kStickKeys, kD>(s_.k[i], x_.k, full, first, head);
      load_key_tile<kStickKeys, kD>(s_.v[i], x_.v, full, first, head);
      if constexpr (Shape::kGated) {
        const int query_head = Shape::kSegments ? x_.member_of(head) : head;
        bulk_load(&s_.gates.keys[i], x_.gates_of(query_head, block + i * kStickKeys),
                  sizeof(KeyGates), full);
      }
    }
  }
  __device__ __forceinline__ void load_queries(int first, const int& block, const int& head) {
    const int stage = state_.stage();
    Mbarrier& full = s_.queries.acquire(state_);
    if (lane() == 0) {
      s_.first_query[stage] = first;
      if (first < 0) {
        full.arrive();
      } else {
        full.arrive_and_expect(2 * 2 * Shape::kQueries * kD + kRowBytes);
        load_token_tile<Shape::kQueries, kD>(s_.q[stage], x_.q, full, first, head);
        load_rows_of(first, block, head, stage, full);
        load_token_tile<Shape::kQueries, kD>(s_.dout[stage], x_.dout, full, first, head);
      }
    }
    __syncwarp();  // no lane falls behind by a phase of the barrier
    state_.advance();
  }
  // Their first keys, and their states in the consumers' blocks. Where a row has none, the consumer
  // does not use what is copied. The warp waits for nothing here: what it would wait for, all
  // consumers would.
  __device__ __forceinline__ void load_rows_of(int first, const int& block, const int& head,
                                               int stage, Mbarrier& full) {
    bulk_load(s_.first_keys[stage], x_.first_key(head, first), sizeof(s_.first_keys[0]), full);
#pragma unroll 1
    for (int n = 0; n < Shape::kConsumers; ++n) {
      bulk_load(&s_.states[stage][n], x_.states(head, x_.place(block / kStickKeys + n), first),
                sizeof(TileStates), full);
    }
  }

  Shared& s_;
  const HopperBackwardArguments& x_;
  PipelineState<Shape::kStages> state_;
};

template <typename Shape>
class KeyGradientConsumer {
  static constexpr int kD = Shape::kD;
  using Shared = KeyGradientShared<Shape>;
  using Scores = WarpgroupAccumulator<kStickKeys>;

 public:
  __device__ __forceinline__ KeyGradientConsumer(Shared& shared, const HopperBackwardArguments& x,
                                                 int index)
      : s_(shared), x_(x), index_(index), group_{1 + index, 128 * (index + 1)} {
    s_.queries.wait(state_);  // the producer begins as if it had loaded a tile
    state_.advance();
  }

  // In place of TileState, which would take a register.
  __device__ __forceinline__ PipelineState<1> tile_state() const {
    // The same in all lanes, which the compiler has to know.
    return {static_cast<uint32_t>(uniform(static_cast<int>(mine().parity)))};
  }
  __device__ __forceinline__ void advance_tile() {
    if (lane() == 0) mine().parity ^= 1;
    __syncwarp();
  }

  __device__ __forceinline__ void compute(const KeyGradientTile& tile) {
    if (lane() == 0) {
      mine().head = tile.head;
      if (Shape::kSegments) mine().parts = tile.parts;
    }
    if constexpr (Shape::kSegments) __syncwarp();
    const int begin = tile.first + kStickKeys * index_;
    const Block block = {begin, first_loaded_key<kStickKeys>(begin, x_.p.tokens)};
    Gradients sums;
    if constexpr (Shape::kSegments) {
      load_sums(sums.dk, sums_of(block, 0));
      load_sums(sums.dv, sums_of(block, 1));
      if constexpr (Shape::kGated) my_gate_sums() = *gate_sums_of(block);
    } else {
      sums.dk.clear();
      sums.dv.clear();
      if constexpr (Shape::kGated) my_gate_sums() = {};
    }
    s_.keys.wait(tile_state());
    walk(sums, block);
    s_.keys.release();
    __syncwarp();
    if constexpr (Shape::kSegments) {
      const int parts = mine().parts;
      if (parts == TileParts::kNone) return;
      const bool last_head = x_.part.member + 1 == x_.p.group;
      // Later ones go on with the sums; if nothing more is needed, these are the results.
      if (parts == TileParts::kMore || !last_head) {
        save_sums(sums_of(block, 0), sums.dk);
        save_sums(sums_of(block, 1), sums.dv);
      }
    }
    if constexpr (Shape::kFar) {
      add_far_key_gradients<kD, Shape::kRowByRow>(x_.p, mine().head, sums.dk, sums.dv, block.begin,
                                                  block.first_key);
    } else {
      write_key_gradients<kD>(x_.p, mine().head, sums.dk, sums.dv, block.begin, block.first_key);
    }
    if constexpr (Shape::kGated && Shape::kSegments) {
      // write_gate_gradients_kernel adds them later; to do so here would spill registers.
      *gate_sums_of(block) = my_gate_sums();
    } else if constexpr (Shape::kGated) {
      write_gate_gradient(block);
    }
  }

 private:
  __device__ __forceinline__ WarpTile& mine() const {
    return s_.warps[reread_thread() / 32 - 4];  // the first four warps load
  }

  struct Gradients {
    WarpgroupAccumulator<kD> dk, dv;
    __device__ __forceinline__ void pin() {
      dk.pin();
      dv.pin();
    }
  };
  struct TileScores {
    Scores s, dp;
    __device__ __forceinline__ void pin() {
      s.pin();
      dp.pin();
    }
  };
  // A and dz of a tile, rounded.
  struct Operands {
    WarpgroupOperand<kStickKeys> a, dz;
    __device__ __forceinline__ void round(const TileScores& x) {
      round_to_operand(a, x.s);
      round_to_operand(dz, x.dp);
    }
    __device__ __forceinline__ void pin() {
      a.pin();
      dz.pin();
    }
  };
  struct Block {
    int begin, first_key;  // of the keys, and the first one that is loaded
  };
  // Of the warp's 16 keys: of dk (0) or dv (1).
  __device__ __forceinline__ float* sums_of(const Block& block, int which) const {
    const HopperSegments& part = x_.part;
    const int head = mine().head - x_.first_head / x_.p.group;
    const int row = (2 * head + which) * part.dkv_rows + block.begin - part.first_key;
    return part.dkv + int64_t{row + warp_row()} * kD;
  }

  // With gates, the thread's part of the sums: in a launch, and between segments.
  __device__ __forceinline__ GateSums& my_gate_sums() const {
    return s_.gate_sums.of_thread[index_][threadIdx.x % 128];
  }
  __device__ __forceinline__ GateSums* gate_sums_of(const Block& block) const {
    return x_.gate_sums(mine().head, block.begin - x_.part.first_key) + threadIdx.x % 128;
  }

  // The gradients of a tile of queries are added during the scan of the next one.
  __device__ __forceinline__ void walk(Gradients& sums, const Block& block) {
    TileScores x;
    int stage = next_stage(block);
    if (stage >= 0) {
      issue_scores(x, stage);
      wait_for_products<0>();
    }
    // The loop ends where no product is under way, which the compiler has to see.
    const bool any = stage >= 0;
    while (any) {
      x.pin();
      if (Shape::kScoreTiles == 2) score_tile_ ^= 1;
      differentiate_rows(x, stage, block, sums);
      if constexpr (Shape::kRowByRow) {
        wait_for_gradients(sums, stage);
      } else if constexpr (!Shape::kGated) {
        Operands rounded;
        rounded.round(x);
        wait_for_gradients(sums, stage);
        group_.sync();
        rounded.pin();
        store_score_tile(s_.a[score_tile_][index_], warp_row(), rounded.a);
        store_score_tile(s_.dz[score_tile_][index_], warp_row(), rounded.dz);
      }
      fence_async_proxy();
      group_.sync();
      const int now = stage;
      stage = stage_if_seen(block);
      if (stage >= 0) {
        issue_scores(x, stage);
        issue_gradients(sums, now);
      } else {
        issue_gradients(sums, now);
        wait_for_products<0>();
        sums.pin();
        stage = next_stage(block);
        if (stage < 0) break;
        issue_scores(x, stage);
        wgmma_commit();  // an empty group in place of the gradients
      }
      wait_for_products<1>();
    }
  }
  // Those of the tile before `stage`.
  __device__ __forceinline__ void wait_for_gradients(Gradients& sums, int stage) {
    wait_for_products<0>();
    sums.pin();
    release_before(stage);
  }

  // Scores become A and dz. Row by row they go to the tiles of scores that no warp reads any more:
  // a warp comes here only after its own products with these, and that all have come so far says
  // the barrier of the tile before.
  __device__ __forceinline__ void differentiate_rows(TileScores& x, int stage, const Block& block,
                                                     Gradients& sums) {
    const bool all = all_see(stage, block);
    if constexpr (Shape::kGated) {
      if (!all) hide_keys(x, stage, block);
      differentiate_row<0, false>(x, stage, block, sums);
      differentiate_row<1, false>(x, stage, block, sums);
    } else if (all) {
      differentiate_row<0, false>(x, stage, block, sums);
      differentiate_row<1, false>(x, stage, block, sums);
    } else {
      differentiate_row<0, true>(x, stage, block, sums);
      differentiate_row<1, true>(x, stage, block, sums);
    }
  }
  // With gates. The state of a row that sees no key of the block has not been written; in its place
  // comes one of zeros, which the same thread reads.
  __device__ __forceinline__ void hide_keys(TileScores& x, int stage, const Block& block) {
    const int first_key = block.first_key + 16 * quad_lane();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      KeyRange seen = keys_of(stage, warp_row() + lane_row() + 8 * i);
      if (!(seen.begin < block.begin + kStickKeys && block.begin < seen.end)) {
        s_.states[stage][index_].of_row[i][threadIdx.x % 128] = {0.0f, 0.0f};
      }
      seen.begin = max(seen.begin, block.begin);
      kernels::hide_keys<kStickKeys / 4>(x.s, i, first_key, seen, x_.p.scale);
    }
  }
  // The end of the keys that a query sees, if it sees any. Of those of another rank it is beyond
  // all: a number that is the same for all queries would be kept in registers, which others need.
  __device__ __forceinline__ int end_key(int query) const {
    if constexpr (Shape::kFar) return query + x_.p.tokens;
    return query + (x_.p.attend_current ? 1 : 0);
  }
  // What row `row` of a tile of queries sees.
  __device__ __forceinline__ KeyRange keys_of(int stage, int row) const {
    const int query = s_.first_query[stage] + row;
    return {query < x_.p.tokens ? s_.first_keys[stage][row] : INT_MAX, end_key(query)};
  }
  template <int kRow, bool kMasked>
  __device__ __forceinline__ void differentiate_row(TileScores& x, int stage, const Block& block,
                                                    Gradients& sums) {
    const unsigned first_row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    KeyRange seen = {0, 0};
    bool some = true;
    if constexpr (kMasked) {
      const int row = s_.first_query[stage] + static_cast<int>(first_row) + 8 * kRow;
      seen.begin = row < x_.p.tokens ? s_.first_keys[stage][first_row + 8 * kRow] : INT_MAX;
      seen.end = end_key(row);
      some = seen.begin < block.begin + kStickKeys && block.begin < seen.end;
      seen.begin = max(seen.begin, block.begin);
    }
    const auto state = [&] {
      HopperGradients::LaneState lane = s_.states[stage][index_].of_row[kRow][threadIdx.x % 128];
      if (kMasked && !some) lane = {0.0f, 0.0f};
      return lane;
    };
    // The compiler keeps the registers of the scores for the next ones, so those of row 0, which is
    // stored, serve row 1.
    const auto spare = [&](int n, float value) {
      if ((Shape::kRowByRow || Shape::kGated) && kRow == 1) x.s.of_row(0, n) = value;
    };
    RowResults<kRow> results = {*this, x};
    if constexpr (Shape::kGated && kRow == 1) results.dgate = my_gate_sums();
    HopperGradients::score_row<kMasked>(
        x.s, x.dp, kRow, block.first_key, score_scale<Shape, !kMasked>(x_.p), seen, state,
        gates_in(s_.gates, index_),
        [&](int t, const HopperGradients::Scored& key) { results.put(t, key); }, spare);
    if constexpr (Shape::kGated && kRow == 1) my_gate_sums() = results.dgate;
    if constexpr (Shape::kGated && !RowResults<kRow>::kStoresAtOnce) {
      wait_for_gradients(sums, stage);
      group_.sync();
      results.store_half(0);
      results.store_half(1);
    }
    if constexpr (Shape::kRowByRow && !Shape::kGated) {
      const unsigned offset = score_chunk_offset();
      store_score_chunks<kRow>(s_.a[score_tile_][index_], offset, 0, x.s);
      store_score_chunks<kRow>(s_.a[score_tile_][index_], offset, 1, x.s);
      store_score_chunks<kRow>(s_.dz[score_tile_][index_], offset, 0, x.dp);
      store_score_chunks<kRow>(s_.dz[score_tile_][index_], offset, 1, x.dp);
    }
  }

  // What becomes of A, dz and y of a row. Without gates A and dz take the place of the scores, to
  // be rounded later. With gates there are not enough registers for that: they are rounded and
  // stored as they come; where tiles of scores are not double, only after the gradients that read
  // the last one. The registers of s keep y, for nothing (see above), and those of dp pairs of y of
  // row 0, which are added to those of row 1.
  template <int kRow>
  struct RowResults {
    static constexpr bool kStoresAtOnce = Shape::kRowByRow || kRow == 1;
    KeyGradientConsumer& consumer;
    TileScores& x;
    GateSums dgate = {};
    HopperGradients::Scored last = {};
    uint32_t a_pairs[2][4] = {}, dz_pairs[2][4] = {}, y_pair = 0;

    __device__ __forceinline__ void put(int t, const HopperGradients::Scored& key) {
      if constexpr (!Shape::kGated) {
        x.s.of_row(kRow, t) = key.a;
        x.dp.of_row(kRow, t) = key.dz;
      } else {
        x.s.of_row(kRow, t) = key.y;
        if (t % 2 == 1) {
          put_pair(t / 2, pack_bf16(last.a, key.a), pack_bf16(last.dz, key.dz));
          put_gate_pair(t / 2, pack_bf16(last.y, key.y));
        }
        last = key;
      }
    }
    __device__ __forceinline__ void put_pair(int n, uint32_t a, uint32_t dz) {
      a_pairs[n / 4][n % 4] = a, dz_pairs[n / 4][n % 4] = dz;
      if (kStoresAtOnce && n % 4 == 3) store_half(n / 4);
    }
    __device__ __forceinline__ void store_half(int half) const {
      consumer.store_chunks<kRow>(half, a_pairs[half], dz_pairs[half]);
    }
    __device__ __forceinline__ void put_gate_pair(int n, uint32_t y) {
      float& of_row_0 = x.dp.of_row(0, n);
      if (kRow == 0) {
        of_row_0 = __uint_as_float(y);
      } else {
        const uint32_t sum = add_bf16(__float_as_uint(of_row_0), y);
        if (n % 2 == 1) dgate.add(n / 2, y_pair, sum);
        y_pair = sum;
      }
    }
  };
  template <int kRow>
  __device__ __forceinline__ void store_chunks(int half, const uint32_t (&a)[4],
                                               const uint32_t (&dz)[4]) const {
    const unsigned offset = (score_chunk_offset() ^ 64u * half) + 1024 * kRow;
    stmatrix_x4(shared_address(s_.a[score_tile_][index_]) + offset, a);
    stmatrix_x4(shared_address(s_.dz[score_tile_][index_]) + offset, dz);
  }

  // Waits for the next tile of queries and returns its stage if they see a key of the block; -1 if
  // not, or if there are no more. Then the tile is still the next one.
  __device__ __forceinline__ int stage_if_seen(const Block& block) {
    const int stage = state_.stage();
    s_.queries.wait(state_);
    const int query = uniform(s_.first_query[stage]);
    const int begin = uniform(s_.first_keys[stage][0]);
    if (query < 0 || !sees(query, block.begin, begin)) return -1;
    state_.advance();
    return stage;
  }
  // The same of the first tile from the next one on that sees a key; passes over the others. No
  // product is under way. The consumer always holds the stage before the one that it works on or
  // waits for, and no earlier one: so the producer can go on, however many are passed.
  __device__ __forceinline__ int next_stage(const Block& block) {
    for (;;) {
      const int stage = stage_if_seen(block);
      if (stage >= 0) return stage;
      const int passed = state_.stage();
      const bool end = uniform(s_.first_query[passed]) < 0;
      release_before(passed);
      state_.advance();
      if (end) return -1;
    }
  }

  // Whether any of the 64 queries sees a key of the block; `begin` is the first key of the first.
  __device__ __forceinline__ bool sees(int query, int block, int begin) const {
    const int end = min(end_key(query + 63), x_.p.tokens);
    return block < end && begin < block + kStickKeys;
  }
  // Whether each of them sees all keys of the block.
  __device__ __forceinline__ bool all_see(int stage, const Block& block) const {
    const int query = uniform(s_.first_query[stage]);
    const int last_begin = uniform(s_.first_keys[stage][63]);
    return query + 63 < x_.p.tokens && last_begin <= block.begin &&
           block.begin + kStickKeys <= (Shape::kFar ? x_.p.tokens : end_key(query));
  }

  static constexpr auto kDescriptors = kD == 64 ? Descriptors::kStepped : Descriptors::kFormed;
  using Queries = TileOperand<Shape::kQueries, kD, TileUse::kRows, kDescriptors>;
  using QueryColumns = TileOperand<Shape::kQueries, kD, TileUse::kColumns, kDescriptors>;
  using Keys = TileOperand<kStickKeys, kD, TileUse::kRows, kDescriptors>;
  using ScoreColumns = TileOperand<Shape::kQueries, kStickKeys, TileUse::kColumns, kDescriptors>;

  __device__ __forceinline__ void issue_scores(TileScores& x, int stage) {
    x.pin();
    wgmma_fence();
    issue_product<kD>(x.s, Queries(s_.q[stage]), Keys(s_.k[index_]));
    issue_product<kD>(x.dp, Queries(s_.dout[stage]), Keys(s_.v[index_]));
    wgmma_commit();
  }
  // Adds what the tiles of scores contribute, which belong to the queries of `stage`.
  __device__ __forceinline__ void issue_gradients(Gradients& sums, int stage) {
    sums.pin();
    wgmma_fence();
    issue_product<Shape::kQueries>(sums.dv, ScoreColumns(s_.a[score_tile_][index_]),
                                   QueryColumns(s_.dout[stage]), true);
    issue_product<Shape::kQueries>(sums.dk, ScoreColumns(s_.dz[score_tile_][index_]),
                                   QueryColumns(s_.q[stage]), true);
    wgmma_commit();
  }

  // dgate of the block's keys.
  __device__ __forceinline__ void write_gate_gradient(const Block& block) {
    group_.sync();
    const int n = static_cast<int>(threadIdx.x % 128);
    if (n < kStickKeys) {
      kernels::write_gate_gradient(x_.p, mine().head, block.begin, n,
                                   s_.gate_sums.of_thread[index_]);
    }
    group_.sync();  // before the sums of the next tile begin
  }

  // The first of the warp's 16 rows.
  static __device__ __forceinline__ int warp_row() {
    return static_cast<int>(threadIdx.x / 32 % 4 * 16);
  }
  __device__ __forceinline__ void release_before(int stage) {
    s_.queries.release(stage == 0 ? Shape::kStages - 1 : stage - 1);
  }

  Shared& s_;
  const HopperBackwardArguments& x_;
  const int index_;
  const NamedThreads<128> group_;
  PipelineState<Shape::kStages> state_;
  int score_tile_ = 0;  // that was stored last
};

// The number of tiles of queries of the segment that a tile of keys walks over.
template <bool kFar = false>
struct KeySteps {
  StickBreakingProblem p;
  HopperSegments part;
  int keys, queries;
  __device__ int operator()(int tile) const {
    if constexpr (kFar) return max(1, (p.far.queries - part.first_query + queries - 1) / queries);
    const int first = part.first_key + tile * keys;
    const Visibility seen = visibility_of<false>(p, StickHead(p, 0));
    const int end = min(seen.end_query(min(first + keys, p.tokens) - 1), part.end_query);
    return max(1, (end - max(first, part.first_query) + queries - 1) / queries);
  }
};

template <typename Tiles>
struct StickKeyGradientMainloop {
  using Shape = Tiles;
  using Arguments = HopperBackwardArguments;
  using Shared = KeyGradientShared<Shape>;
  using Producer = KeyGradientProducer<Shape>;
  using Consumer = KeyGradientConsumer<Shape>;
  static constexpr int kTileRows = Shape::kKeys;
  static __device__ __forceinline__ bool needed(const Arguments& x) requires(Shape::kSegments) {
    return segment_is_needed(x.part);
  }
  static KeySteps<Shape::kFar> steps(const Arguments& x) {
    return {x.p, x.part, Shape::kKeys, Shape::kQueries};
  }
};

}  // namespace sbtrain::kernels
