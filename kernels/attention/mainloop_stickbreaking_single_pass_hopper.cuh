// The stick-breaking backward pass for sm_90a in a single pass: five products and one scan for each
// pair of query and key, where the two phases take seven and two
// (mainloop_stickbreaking_query_gradient_hopper.cuh).
//
// A block of threads owns 192 keys (of heads of 128 channels 128), whose K and V stay in shared
// memory, and walks over the tiles of 64 queries that see them, from the last to the first. Each of
// its three (two) consumers owns 64 of the keys. Of a row they need log2 T and C at the left of
// their keys: what comes from the block of keys further left, through device memory behind a
// counter for each tile, and what the consumers further left contribute. Every consumer says what
// its own keys leave of the stick as soon as it knows it, and later what they add to C, so none
// waits for another's state, only for two barriers.
//
// The consumers compute dq of a tile in turns, or two of them half of its channels each, from dz of
// all these keys. Another warpgroup loads,
// passes states on and adds dq to sums in device memory, block after block from left to right, so
// that the bits are the same on every run. The first block stores the sums.
//
// With gates, scores become their odds e' and stay that (score_stickbreaking.cuh): the gradient of
// log f is y = g - e' C, and dz follows from it. beta would not do, since near a whole stick 1 -
// beta loses all digits. What pairs of keys leave, on which A and dz depend, is kept in the tile of
// dz until dz takes its place.
#pragma once

#include "kernels/attention/gate_sums_hopper.cuh"
#include "kernels/primitives/flag.cuh"

namespace sbtrain::kernels {

template <int kHeadDim>
struct SinglePassShape {
  static constexpr int kD = kHeadDim;
  static constexpr bool kFolded = false;
  static constexpr bool kGated = false;
  static constexpr bool kFar = false;
  // Sums of dk and dv of 128 channels take 128 registers of a thread: two consumers have so many.
  static constexpr bool kWide = kD == 128;
  static constexpr int kConsumers = kWide ? 2 : 3;
  static constexpr int kKeys = kStickKeys * kConsumers;
  static_assert(kWide || kKeys == kSinglePassKeys);
  static constexpr int kQueries = kSinglePassQueries;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kStages = kConsumers;  // the consumer of this number computes dq
  // Wide heads have no room for A and dz of two tiles. Each consumer computes dq of as many
  // channels as it has keys, of every tile.
  static constexpr int kScoreTiles = kWide ? 1 : 2;
  static constexpr int kDqChannels = kWide ? 64 : kD;
  // Whether a consumer waits for dq of the tile before before it lets the others go on to dz, of
  // which there may be one tile alone then.
  static constexpr bool kWaitsEarly = kWide;
  static_assert(kWaitsEarly || kScoreTiles == 2);
  static constexpr int kProducerRegisters = kWide ? 40 : 32;
  static constexpr int kConsumerRegisters = kWide ? 232 : 160;
};

// Where `taken` begins if no place is seen, in each of its bytes: far beyond the last one.
inline constexpr int kNothingSeen = 0x7f;

// The counters begin where begin_single_pass_kernel() sets them. [H] are the heads of the launch.
struct SinglePassArguments {
  StickBreakingProblem p;
  float scale_log2 = 1.0f;    // of q k^T, where it is not folded into the queries
  int first_head = 0;         // of the launch
  int heads = 0;              // of the launch
  int tiles = 0;              // of 64 queries
  int places = 0;             // of 192 keys
  int* taken = nullptr;       // the next block of keys: place * heads + head
  int* first_keys = nullptr;  // [H, 64 tiles]: that each row sees
  float2* states = nullptr;   // {log2 T, C} [H, 64 tiles], at the left of the place that is next
  int* next = nullptr;        // [H, tiles]: the place that is next to take the states
  int* next_dq = nullptr;     // [H, tiles]: and to add to dq
  float* dq = nullptr;        // [H, tiles, 64 d], as the lanes hold it (save_sums)
  KeyGates* gates = nullptr;  // [H, T / 64], with gates
  float* dkv = nullptr;       // [H, 2, places, 192 d], the same, where heads share keys and values
  CUtensorMap q, dout, k, v;  // of 64 queries or keys
  __device__ __forceinline__ int tile(int head, int tile) const {
    return (head - first_head) * tiles + tile;
  }
  __device__ __forceinline__ KeyGates* gates_of(int head, int block) const {
    return gates_of_loaded_keys(gates, p.tokens, head - first_head, block);
  }
  // Of the warp's 16 rows of a block of 64 keys: dk (0) or dv (1).
  template <int kD>
  __device__ __forceinline__ float* sums_of(int head, int block, int which) const {
    const int row = block + static_cast<int>(threadIdx.x / 32 % 4 * 16);
    const int64_t rows = int64_t{places} * kSinglePassKeys;
    return dkv + ((2 * (head - first_head) + which) * rows + row) * kD;
  }
};

// A block of 192 keys, and the last tile of queries that sees it.
struct SinglePassTile : KeyTile {
  int place = 0;
  int last = -1;  // < 0: no query sees a key
};
__device__ __forceinline__ SinglePassTile uniform(const SinglePassTile& x) {
  return {uniform(static_cast<const KeyTile&>(x)), uniform(x.place), uniform(x.last)};
}

// What a warp has no register for.
struct WarpBlock {
  int head;         // of a consumer
  uint32_t parity;  // of the phase of the barriers in which the block of keys comes
};

template <typename Shape>
struct SinglePassShared {
  static constexpr int kD = Shape::kD, kStages = Shape::kStages, kConsumers = Shape::kConsumers;
  static constexpr int kQueries = Shape::kQueries;
  alignas(1024) __nv_bfloat16 k[kConsumers][kStickKeys * kD];
  alignas(1024) __nv_bfloat16 v[kConsumers][kStickKeys * kD];
  alignas(1024) __nv_bfloat16 q[kStages][kQueries * kD];
  alignas(1024) __nv_bfloat16 dout[kStages][kQueries * kD];
  alignas(1024) __nv_bfloat16 a[Shape::kScoreTiles][kConsumers][kQueries * kStickKeys];
  alignas(1024) __nv_bfloat16 dz[Shape::kScoreTiles][kConsumers][kQueries * kStickKeys];
  alignas(128) float dq[kQueries * kD];
  // Of each row: log2 of what the keys of each consumer leave of the stick, and what they add to C.
  // The fourth numbers are the state that comes from the left, log2 T and C.
  alignas(16) float logs[kStages][kQueries][4];
  alignas(16) float sums[kStages][kQueries][4];
  alignas(16) int first_keys[kStages][kQueries];
  int next_tile[kStages];  // that sees the keys; < 0: there are no more
  Pipeline<1> keys, tiles;
  Pipeline<kStages> queries;
  Mbarrier arrived[kStages];                    // the states have
  Mbarrier handed[kStages];                     // logs and sums are complete
  Mbarrier differentiated[Shape::kScoreTiles];  // dz of all keys is complete
  Pipeline<1> staged;                           // dq
  SinglePassTile tile;
  WarpBlock warps[Shape::kThreads / 32];
  GateBuffers<Shape::kGated, kConsumers> gates;
  GateSumBuffers<Shape::kGated, kConsumers> gate_sums;

  __device__ __forceinline__ WarpBlock& my_block() { return warps[reread_thread() / 32]; }
  __device__ __forceinline__ PipelineState<1> block_state() {
    // The same in all lanes, which the compiler has to know.
    return {static_cast<uint32_t>(uniform(static_cast<int>(my_block().parity)))};
  }
  __device__ __forceinline__ void advance_block() {
    if (lane() == 0) my_block().parity ^= 1;
    __syncwarp();
  }
  __device__ __forceinline__ void init() {
    constexpr int kWarps = 4 * kConsumers;
    tiles.init(1, kWarps + 3);
    keys.init(1, kWarps);
    queries.init(1, kWarps + 3);
    for (int i = 0; i < kStages; ++i) {
      arrived[i].init(1);
      handed[i].init(kWarps);
    }
    for (Mbarrier& barrier : differentiated) barrier.init(kWarps);
    staged.init(Shape::kWide ? kWarps : 4, 1);
    for (WarpBlock& warp : warps) warp.parity = 0;
  }
};

// The fourth warpgroup. Warp 0 takes blocks and loads keys and queries, warp 1 fetches states, warp
// 2 passes them on and warp 3 adds dq.
template <typename Shape>
class SinglePassHelper {
  static constexpr int kD = Shape::kD, kQueries = Shape::kQueries;
  using Shared = SinglePassShared<Shape>;

 public:
  __device__ __forceinline__ SinglePassHelper(Shared& shared, const SinglePassArguments& x)
      : s_(shared), x_(x) {}

  // The block is read again from shared memory where it is used, since threads have few registers.
  __device__ __forceinline__ void run() {
    const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
    if (warp == 0) return load_blocks();
    for (;;) {
      s_.tiles.wait(s_.block_state());
      if (uniform(s_.tile.first) < 0) return;
      for (int tile = uniform(s_.tile.last); tile >= 0;) {
        const int stage = queries_.stage();
        s_.queries.wait(queries_);
        const int next = uniform(s_.next_tile[stage]);
        if (warp == 1) fetch_states(tile, stage);
        if (warp == 2) pass_states_on(tile, stage);
        if (warp == 3) add_query_gradient(tile, stage);
        queries_.advance();
        tile = next;
      }
      s_.tiles.release();
      s_.advance_block();
    }
  }

 private:
  // ---- Warp 0 ----
  __device__ __forceinline__ void load_blocks() {
    for (;;) {
      const SinglePassTile block = take_block();
      Mbarrier& full = s_.tiles.acquire(s_.block_state());
      if (lane() == 0) {
        s_.tile = block;
        full.arrive();
      }
      __syncwarp();
      if (block.first < 0) return;
      int tile = block.last;
      if (tile >= 0) tile = load_queries(tile);
      load_keys();
      while (tile >= 0) tile = load_queries(tile);
      s_.advance_block();
    }
  }
  // Places are taken from left to right, all heads of one place first. Where a block waits, it
  // waits for what the blocks of the same head and the places further left say of a tile of
  // queries. Those have been taken before, by thread blocks that run, and the first place that sees
  // a tile waits for none: by induction over the order in which they are taken all blocks end. In
  // whatever order thread blocks start, none waits for one that does not run yet.
  __device__ __forceinline__ SinglePassTile take_block() const {
    int n = 0;
    if (lane() == 0) n = atomicAdd(x_.taken, 1);
    n = __shfl_sync(~0u, n, 0);
    const StickBreakingProblem& p = x_.p;
    const int place = n / x_.heads;
    if (place >= x_.places) return {};
    const int first = place * Shape::kKeys, head = x_.first_head + n % x_.heads;
    const int end_key = min(first + Shape::kKeys, p.tokens);
    const int end = visibility_of<false, Shape::kFar>(p, StickHead(p, head)).end_query(end_key - 1);
    return {{first, head}, place, tile_before((end + kQueries - 1) / kQueries, first, head)};
  }
  // The last tile before this one whose queries see a key of the block that begins at `first`. The
  // first row of a tile is the one that sees furthest to the left, but where sticks are used up,
  // some tiles may see less than those before them.
  __device__ __forceinline__ int tile_before(int tile, int first, int head) const {
    const int begin = Shape::kFar ? 0 : first / kQueries;
    if (x_.p.skip_epsilon == 0) return tile > begin ? tile - 1 : -1;
    for (; tile > begin; tile -= 32) {
      const int mine = tile - 1 - lane();
      // Of far keys, a row to which nothing of its stick has come sees none, from p.tokens on.
      const int end = Shape::kFar ? min(first + Shape::kKeys, x_.p.tokens) : first + Shape::kKeys;
      const bool sees =
          mine >= begin && x_.first_keys[int64_t{x_.tile(head, mine)} * kQueries] < end;
      const unsigned votes = __ballot_sync(~0u, sees);
      if (votes != 0) return tile - __ffs(static_cast<int>(votes));
    }
    return -1;
  }
  __device__ __forceinline__ void load_keys() {
    Mbarrier& full = s_.keys.acquire(s_.block_state());
    if (lane() == 0) {
      constexpr int kGateBytes = Shape::kGated ? Shape::kConsumers * sizeof(KeyGates) : 0;
      full.arrive_and_expect(2 * 2 * Shape::kKeys * kD + kGateBytes);
#pragma unroll 1
      for (int i = 0; i < Shape::kConsumers; ++i) {
        const int first = first_loaded_key<kStickKeys>(s_.tile.first + i * kStickKeys, x_.p.tokens);
        const int key_head = s_.tile.head / x_.p.group;
        load_key_tile<kStickKeys, kD>(s_.k[i], x_.k, full, first, key_head);
        load_key_tile<kStickKeys, kD>(s_.v[i], x_.v, full, first, key_head);
        if constexpr (Shape::kGated) {
          bulk_load(&s_.gates.keys[i], x_.gates_of(s_.tile.head, s_.tile.first + i * kStickKeys),
                    sizeof(KeyGates), full);
        }
      }
    }
    __syncwarp();
  }
  // Returns the next tile, or -1.
  __device__ __forceinline__ int load_queries(int tile) {
    const int stage = queries_.stage();
    const int next = tile_before(tile, s_.tile.first, s_.tile.head);
    Mbarrier& full = s_.queries.acquire(queries_);
    if (lane() == 0) {
      s_.next_tile[stage] = next;
      const int first = tile * kQueries, head = s_.tile.head;
      full.arrive_and_expect(2 * 2 * kQueries * kD + static_cast<int>(sizeof(s_.first_keys[0])));
      load_token_tile<kQueries, kD>(s_.q[stage], x_.q, full, first, head);
      bulk_load(s_.first_keys[stage], x_.first_keys + int64_t{x_.tile(head, tile)} * kQueries,
                sizeof(s_.first_keys[0]), full);
      load_token_tile<kQueries, kD>(s_.dout[stage], x_.dout, full, first, head);
    }
    __syncwarp();
    queries_.advance();
    return next;
  }

  // ---- Warps 1 and 2: a lane has two rows ----
  __device__ __forceinline__ float4* states_of(int tile) const {
    return reinterpret_cast<float4*>(x_.states + int64_t{x_.tile(s_.tile.head, tile)} * kQueries) +
           lane();
  }
  __device__ __forceinline__ void fetch_states(int tile, int stage) {
    if (lane() == 0) wait_for_value(x_.next + x_.tile(s_.tile.head, tile), s_.tile.place);
    __syncwarp();
    const float4 states = __ldcg(states_of(tile));
    s_.logs[stage][2 * lane()][3] = states.x;
    s_.sums[stage][2 * lane()][3] = states.y;
    s_.logs[stage][2 * lane() + 1][3] = states.z;
    s_.sums[stage][2 * lane() + 1][3] = states.w;
    arrive_as_warp(s_.arrived[stage]);
    s_.queries.release(stage);
  }
  __device__ __forceinline__ void pass_states_on(int tile, int stage) {
    s_.handed[stage].wait(queries_.parity());
    const int row = 2 * lane();
    *states_of(tile) = make_float4(
        at_right<false>(s_.logs[stage][row]), at_right<true>(s_.sums[stage][row]),
        at_right<false>(s_.logs[stage][row + 1]), at_right<true>(s_.sums[stage][row + 1]));
    __syncwarp();
    if (lane() == 0) {
      store_release(x_.next + x_.tile(s_.tile.head, tile), s_.tile.place + 1);
    }
    s_.queries.release(stage);
  }
  // The state at the right of the block's keys.
  template <bool kAdds>
  static __device__ __forceinline__ float at_right(const float (&of_row)[4]) {
    const float4 x = *reinterpret_cast<const float4*>(of_row);
    float sum = x.x + x.y;
    if constexpr (Shape::kConsumers == 3) sum += x.z;
    return kAdds ? x.w + sum : x.w - sum;
  }

  // ---- Warp 3: adds what a consumer has staged, and says so when it is there ----
  __device__ __forceinline__ void add_query_gradient(int tile, int stage) {
    const bool first = s_.first_keys[stage][0] >= s_.tile.first;  // place that sees the tile
    s_.queries.release(stage);
    if (lane() == 0) {
      const int at = x_.tile(s_.tile.head, tile);
      if (!first) wait_for_value(x_.next_dq + at, s_.tile.place);
      s_.staged.wait(staged_);
      fence_all_proxies();
      if (first) {
        bulk_store(x_.dq + int64_t{at} * (kQueries * kD), s_.dq, sizeof(s_.dq));
      } else {
        bulk_add(x_.dq + int64_t{at} * (kQueries * kD), s_.dq, sizeof(s_.dq));
      }
      bulk_commit();
      bulk_wait_read<0>();
      s_.staged.empty[0].arrive();
      bulk_wait<0>();
      fence_all_proxies();
      store_release(x_.next_dq + at, s_.tile.place + 1);
    }
    __syncwarp();
    staged_.advance();
  }

  Shared& s_;
  const SinglePassArguments& x_;
  PipelineState<Shape::kStages> queries_;
  PipelineState<1> staged_;
};

template <typename Shape>
class SinglePassConsumer {
  static constexpr int kD = Shape::kD, kQueries = Shape::kQueries;
  static constexpr int kLaneKeys = kStickKeys / 4, kGroups = kLaneKeys / 4;
  using Shared = SinglePassShared<Shape>;
  using Scores = WarpgroupAccumulator<kStickKeys>;

 public:
  __device__ __forceinline__ SinglePassConsumer(Shared& shared, const SinglePassArguments& x,
                                                int index)
      : s_(shared), x_(x), index_(index) {}

  __device__ __forceinline__ void run() {
    for (;;) {
      s_.tiles.wait(s_.block_state());
      const SinglePassTile block = uniform(s_.tile);
      if (lane() == 0) s_.my_block().head = block.head;
      s_.tiles.release();
      if (block.first < 0) return;
      compute(block);
      s_.advance_block();
    }
  }

 private:
  struct Gradients {
    WarpgroupAccumulator<kD> dk, dv;
    __device__ __forceinline__ void pin() {
      dk.pin();
      dv.pin();
    }
  };
  // Heads of 32 channels leave registers to dq, but for gates. Others have it in those of dp, which
  // then is not there yet while dq of the tile before is.
  static constexpr bool kOwnDq = kD == 32 && !Shape::kGated;
  using QueryGradient = WarpgroupAccumulator<Shape::kDqChannels>;
  struct TileScores {
    Scores s, dp;
    QueryGradient own_dq;  // if kOwnDq
    __device__ __forceinline__ QueryGradient& dq() {
      if constexpr (kOwnDq) return own_dq;
      static_assert(sizeof(QueryGradient) <= sizeof(Scores));
      return reinterpret_cast<QueryGradient&>(dp);
    }
    __device__ __forceinline__ void pin_products() {
      dp.pin();
      if constexpr (kOwnDq) own_dq.pin();
    }
  };
  struct Block {
    int begin, first_key;  // of the keys, and the first one that is loaded
  };
  // With gates: y of pairs of the lane's keys, the sum of its rows, rounded to bf16.
  struct GatePairs {
    uint32_t of[kLaneKeys / 2];
  };
  // What a lane keeps of its rows while it waits.
  struct Rows {
    float log2_kept[2];  // of what the lane's keys leave, and those of the quad left of them
    float c[2];          // what the quad's keys left of the lane add to C
  };

  __device__ __forceinline__ void compute(const SinglePassTile& tiles) {
    const int begin = tiles.first + kStickKeys * index_;
    const Block block = {begin, first_loaded_key<kStickKeys>(begin, x_.p.tokens)};
    Gradients sums;
    sums.dk.clear();
    sums.dv.clear();
    if constexpr (Shape::kGated) my_gate_sums() = {};
    s_.keys.wait(s_.block_state());
    if (tiles.last >= 0) walk(sums, block, tiles.last);
    s_.keys.release();
    __syncwarp();
    write(sums, block, s_.my_block().head);
    if constexpr (Shape::kGated) write_gate_gradient(block);
  }
  // From tile to tile. dv and dk of one, and dp or dq, are under way until the sticks of the next
  // one are known.
  __device__ __forceinline__ void walk(Gradients& sums, const Block& block, int tile) {
    TileScores x;
    s_.queries.wait(state_);
    issue_scores(x, state_.stage());
    issue_value_products(x, state_.stage());
    wait_for_products<0>();
    bool has_dq = false;  // x has dq of the tile before
    int before = -1;      // its stage
#pragma unroll 1
    for (;;) {
      const int stage = state_.stage();
      Rows rows;
      x.s.pin();
      exponentials(x.s);
      if (!all_see(stage, tile, block)) hide(x.s, stage, tile * kQueries, block);
      meet_keys<0>(x.s, rows, stage);
      meet_keys<1>(x.s, rows, stage);
      if constexpr (Shape::kWaitsEarly) {
        if (has_dq) {
          wait_for_products<0>();
          x.pin_products();
          sums.pin();
          hand_over_query_gradient(x, stage);
        }
      }
      sync_consumers();  // logs are complete
      s_.arrived[stage].wait(state_.parity());
      const float sticks[2] = {stick<0>(rows, stage), stick<1>(rows, stage)};
      wait_for_products<0>();
      x.pin_products();
      sums.pin();
      if (before >= 0) s_.queries.release(before);
      if constexpr (!Shape::kWaitsEarly) {
        if (has_dq) {
          hand_over_query_gradient(x, stage);
          if constexpr (!kOwnDq) {
            wait_for_products<0>();
            x.dp.pin();
          }
        }
      }
      break_stick<0>(x, rows, sticks[0], stage);
      break_stick<1>(x, rows, sticks[1], stage);
      arrive_as_warp(s_.handed[stage]);
      sync_consumers();  // sums are complete
      GatePairs pairs;
      differentiate<0>(x, rows, stage, pairs);
      differentiate<1>(x, rows, stage, pairs);
      fence_async_proxy();
      arrive_as_warp(s_.differentiated[scores_.stage()]);
      sync_threads<128>(kScores + index_);
      state_.advance();
      has_dq = Shape::kWide || stage == index_;
      tile = uniform(s_.next_tile[stage]);
      if (tile < 0) {
        add_gate_pairs(pairs);
        end_walk(x, sums, stage, has_dq);
        break;
      }
      s_.queries.wait(state_);
      issue_scores(x, state_.stage());
      if (!has_dq) {
        issue_value_products(x, state_.stage());
        issue_gradients(sums, stage);
      } else {
        if constexpr (kOwnDq) issue_value_products(x, state_.stage());
        issue_gradients(sums, stage);
        issue_query_gradient(x);
      }
      add_gate_pairs(pairs);
      scores_.advance();
      before = stage;
      wait_for_products<2>();
    }
  }
  // Once dq of the tile before is complete. Where it lies in the registers of do·v, that begins
  // now.
  __device__ __forceinline__ void hand_over_query_gradient(TileScores& x, int stage) {
    stage_query_gradient(x.dq());
    if constexpr (!kOwnDq) issue_value_products(x, stage);
  }
  // The gradients of the last tile.
  __device__ __forceinline__ void end_walk(TileScores& x, Gradients& sums, int stage, bool has_dq) {
    issue_gradients(sums, stage);
    if (has_dq) issue_query_gradient(x);
    wait_for_products<0>();
    sums.pin();
    x.pin_products();
    scores_.advance();
    if (has_dq) stage_query_gradient(x.dq());
    s_.queries.release(stage);
  }

  static constexpr int kMeeting = 1, kScores = 2;  // barriers
  __device__ __forceinline__ void sync_consumers() const {
    sync_threads<128 * Shape::kConsumers>(kMeeting);
  }
  // The lane's row kRow of the tile.
  template <int kRow>
  static __device__ __forceinline__ int row() {
    return static_cast<int>(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4) + 8 * kRow;
  }

  // Scores become e, or e' with gates.
  __device__ __forceinline__ void exponentials(Scores& s) const {
    if constexpr (Shape::kGated) {
      find_gated_odds(s);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int t = 0; t < kLaneKeys; ++t) {
          const float z = s.of_row(i, t);
          s.of_row(i, t) = exp2_ftz(Shape::kFolded ? z : z * x_.scale_log2);
        }
      }
    }
  }
  // As gated_odds(), but both rows together, which read the same gates. An e' may be infinite here
  // as an e may without gates, and is clamped as that is (keep_or_clamp).
  __device__ __forceinline__ void find_gated_odds(Scores& s) const {
    const LaneGates gates = gates_in(s_.gates, index_);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const float4 shift = gates.log2_inverse(g), closed = gates.closed(g);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          float& score = s.of_row(i, 4 * g + n);
          const float z = fmaf(score, -x_.scale_log2, element(shift, n));
          score = reciprocal_ftz(exp2_ftz(z) + element(closed, n));
        }
      }
    }
  }
  // e of keys that the rows do not see becomes zero.
  __device__ __forceinline__ void hide(Scores& s, int stage, int first_query,
                                       const Block& block) const {
    const int first = block.first_key + kLaneKeys * quad_lane();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = SinglePassConsumer::row<0>() + 8 * i;
      const int query = first_query + row;
      int begin = query < x_.p.tokens ? s_.first_keys[stage][row] : INT_MAX;
      begin = max(begin, block.begin) - first;
      const int end = (Shape::kFar ? x_.p.tokens : query + (x_.p.attend_current ? 1 : 0)) - first;
#pragma unroll
      for (int t = 0; t < kLaneKeys; ++t) {
        if (t < begin || t >= end) s.of_row(i, t) = 0.0f;
      }
    }
  }
  // e becomes beta = e / (1 + e), but e' stays. What the keys leave of the stick is said to the
  // others.
  template <int kRow>
  __device__ __forceinline__ void meet_keys(Scores& s, Rows& rows, int stage) {
    float e[kLaneKeys], kept[2 * kGroups], all[kGroups];
#pragma unroll
    for (int t = 0; t < kLaneKeys; ++t) e[t] = s.of_row(kRow, t);
    float mine;
    if (HopperGradients::template keep_or_clamp<false>(e, kept, all)) {
      mine = HopperGradients::template sum_of_logarithms<4>(all);
    } else {
      mine = HopperGradients::template sum_of_logarithms<1>(all);
    }
    if constexpr (Shape::kGated) {
      save_kept<kRow>(kept);
#pragma unroll
      for (int t = 0; t < kLaneKeys; ++t) s.of_row(kRow, t) = e[t];  // clamped
    } else {
#pragma unroll
      for (int n = 0; n < 2 * kGroups; ++n) {
        const float m = e[2 * n] * kept[n];
        s.of_row(kRow, 2 * n) = fmaf(m, e[2 * n + 1], m);
        s.of_row(kRow, 2 * n + 1) = e[2 * n + 1] * (kept[n] + m);
      }
    }
    const QuadSums of_quad = quad_sums(mine);
    rows.log2_kept[kRow] = of_quad.left + mine;
    s_.logs[stage][row<kRow>()][index_] = of_quad.all;
  }
  // The sums of x of the quad and of its lanes further left.
  struct QuadSums {
    float all, left;
  };
  static __device__ __forceinline__ QuadSums quad_sums(float x) {
    const float neighbour = __shfl_xor_sync(~0u, x, 1);
    const float pair = x + neighbour;
    const float others = __shfl_xor_sync(~0u, pair, 2);
    float left = (threadIdx.x & 1) != 0 ? neighbour : 0.0f;
    if ((threadIdx.x & 2) != 0) left += others;
    return {pair + others, left};
  }
  // Of a row: the state from the left, and the sum of the consumers further left.
  struct Left {
    float state, sum;
  };
  __device__ __forceinline__ Left left_of_keys(const float (&of_row)[4]) const {
    const float4 x = *reinterpret_cast<const float4*>(of_row);
    float sum = index_ > 0 ? x.x : 0.0f;
    if (index_ > 1) sum += x.y;
    return {x.w, sum};
  }

  // The stick that comes to the lane's last key from the right.
  template <int kRow>
  __device__ __forceinline__ float stick(const Rows& rows, int stage) const {
    const Left left = left_of_keys(s_.logs[stage][row<kRow>()]);
    return exp2_ftz(left.state - (left.sum + rows.log2_kept[kRow]));
  }

  // Where the lane's row kRow of the consumer's scores is stored, half of its columns at this
  // address and half at the other one that differs in bit 6.
  template <int kRow, typename Tiles>
  __device__ __forceinline__ uint32_t score_address(const Tiles& tiles) const {
    return shared_address(tiles[scores_.stage()][index_]) + 1024 * kRow + score_chunk_offset();
  }

  // With gates: what the lane's pairs of keys of row kRow leave, in half of its keys. They lie
  // where the lane says that dz be stored, so that dz of other rows does not overwrite them.
  template <int kRow>
  __device__ __forceinline__ float4& kept_of(int half) const {
    auto* const tile = reinterpret_cast<unsigned char*>(s_.dz[scores_.stage()][index_]);
    return *reinterpret_cast<float4*>(tile + 1024 * kRow + (score_chunk_offset() ^ 64u * half));
  }
  template <int kRow>
  __device__ __forceinline__ void save_kept(const float (&kept)[2 * kGroups]) const {
    static_assert(kGroups == 4);
    kept_of<kRow>(0) = make_float4(kept[0], kept[1], kept[2], kept[3]);
    kept_of<kRow>(1) = make_float4(kept[4], kept[5], kept[6], kept[7]);
  }

  // From e' with gates: A is stored, and dp becomes what y is where C at the lane's left is zero.
  template <int kRow>
  __device__ __forceinline__ void break_gated_stick(TileScores& x, Rows& rows, float stick,
                                                    int stage) {
    const uint32_t address = score_address<kRow>(s_.a);
#pragma unroll
    for (int half = 1; half >= 0; --half) {
      const float4 kept = kept_of<kRow>(half);
      uint32_t rounded[4];
#pragma unroll
      for (int n = 3; n >= 0; --n) {
        const int t = 8 * half + 2 * n;
        stick *= element(kept, n);
        const float a = x.s.of_row(kRow, t) * stick;
        const float next = x.s.of_row(kRow, t + 1) * (stick + a);
        x.dp.of_row(kRow, t) *= a;
        x.dp.of_row(kRow, t + 1) *= next;
        rounded[n] = pack_bf16(a, next);
      }
      stmatrix_x4(address ^ 64u * half, rounded);
    }
    float sum = 0.0f;
#pragma unroll
    for (int t = 0; t < kLaneKeys; ++t) {
      const float g = x.dp.of_row(kRow, t);
      x.dp.of_row(kRow, t) = fmaf(-x.s.of_row(kRow, t), sum, g);
      sum += g;
    }
    const QuadSums of_quad = quad_sums(sum);
    rows.c[kRow] = of_quad.left;
    s_.sums[stage][row<kRow>()][index_] = of_quad.all;
  }

  // From beta: A is stored, and dp becomes what dz is where C at the lane's left is zero: with
  // g = A dp and P the sum of g up to a key, dz = g - beta (C + P).
  template <int kRow>
  __device__ __forceinline__ void break_stick(TileScores& x, Rows& rows, float stick, int stage) {
    if constexpr (Shape::kGated) return break_gated_stick<kRow>(x, rows, stick, stage);
    const uint32_t address = score_address<kRow>(s_.a);
#pragma unroll
    for (int half = 1; half >= 0; --half) {
      uint32_t rounded[4];
#pragma unroll
      for (int n = 3; n >= 0; --n) {
        const int t = 8 * half + 2 * n;
        const float after = fmaf(-x.s.of_row(kRow, t + 1), stick, stick);
        const float a[2] = {x.s.of_row(kRow, t) * after, x.s.of_row(kRow, t + 1) * stick};
        stick = fmaf(-x.s.of_row(kRow, t), after, after);
        x.dp.of_row(kRow, t) *= a[0];
        x.dp.of_row(kRow, t + 1) *= a[1];
        rounded[n] = pack_bf16(a[0], a[1]);
      }
      stmatrix_x4(address ^ 64u * half, rounded);
    }
    float sum = 0.0f;
#pragma unroll
    for (int t = 0; t < kLaneKeys; ++t) {
      const float g = x.dp.of_row(kRow, t);
      sum += g;
      x.dp.of_row(kRow, t) = fmaf(-x.s.of_row(kRow, t), sum, g);
    }
    const QuadSums of_quad = quad_sums(sum);
    rows.c[kRow] = of_quad.left;
    s_.sums[stage][row<kRow>()][index_] = of_quad.all;
  }

  // C at the left of the lane's keys.
  template <int kRow>
  __device__ __forceinline__ float left_sum(const Rows& rows, int stage) const {
    const Left left = left_of_keys(s_.sums[stage][row<kRow>()]);
    return left.state + (left.sum + rows.c[kRow]);
  }
  // With gates: stores dz and adds up y of the lane's two rows. Those of row 0 wait in registers of
  // s for those of row 1.
  template <int kRow>
  __device__ __forceinline__ void differentiate_gated(TileScores& x, const Rows& rows, int stage,
                                                      GatePairs& pairs) {
    const float c = left_sum<kRow>(rows, stage);
    const uint32_t address = score_address<kRow>(s_.dz);
    const float4 kept[2] = {kept_of<kRow>(0), kept_of<kRow>(1)};
    __syncwarp();  // dz of the first half takes the place of what other lanes kept
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t rounded[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int t = 8 * half + 2 * n;
        const Complements<LaneGates> complements(gates_in(s_.gates, index_), t / 4);
        const float of_pair = element(kept[half], n);
        const float e = x.s.of_row(kRow, t), next = x.s.of_row(kRow, t + 1);
        const float y = fmaf(-e, c, x.dp.of_row(kRow, t));
        const float y_next = fmaf(-next, c, x.dp.of_row(kRow, t + 1));
        const float r = complements.of(t % 4, fmaf(of_pair, next, of_pair));
        const float r_next = complements.of(t % 4 + 1, fmaf(of_pair, e, of_pair));
        rounded[n] = pack_bf16(r * y, r_next * y_next);
        if constexpr (kRow == 0) {
          x.s.of_row(0, t) = y;
          x.s.of_row(0, t + 1) = y_next;
        } else {
          pairs.of[t / 2] = pack_bf16(x.s.of_row(0, t) + y, x.s.of_row(0, t + 1) + y_next);
        }
      }
      stmatrix_x4(address ^ 64u * half, rounded);
    }
  }
  // While products are under way: nothing waits for these sums.
  __device__ __forceinline__ void add_gate_pairs(const GatePairs& pairs) const {
    if constexpr (Shape::kGated) {
      GateSums dgate = my_gate_sums();
#pragma unroll
      for (int c = 0; c < kGroups; ++c) dgate.add(c, pairs.of[2 * c], pairs.of[2 * c + 1]);
      my_gate_sums() = dgate;
    }
  }
  // The thread's part of the sums of y.
  __device__ __forceinline__ GateSums& my_gate_sums() const {
    return s_.gate_sums.of_thread[index_][threadIdx.x % 128];
  }
  // dgate of the block's keys.
  __device__ __forceinline__ void write_gate_gradient(const Block& block) const {
    sync_threads<128>(kScores + index_);
    const int n = static_cast<int>(threadIdx.x % 128);
    if (n < kStickKeys) {
      kernels::write_gate_gradient(x_.p, s_.my_block().head, block.begin, n,
                                   s_.gate_sums.of_thread[index_]);
    }
    sync_threads<128>(kScores + index_);  // before the sums of the next block begin
  }

  // Stores dz.
  template <int kRow>
  __device__ __forceinline__ void differentiate(TileScores& x, const Rows& rows, int stage,
                                                GatePairs& pairs) {
    if constexpr (Shape::kGated) return differentiate_gated<kRow>(x, rows, stage, pairs);
    const float c = left_sum<kRow>(rows, stage);
    const uint32_t address = score_address<kRow>(s_.dz);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t rounded[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int t = 8 * half + 2 * n;
        rounded[n] = pack_bf16(fmaf(-x.s.of_row(kRow, t), c, x.dp.of_row(kRow, t)),
                               fmaf(-x.s.of_row(kRow, t + 1), c, x.dp.of_row(kRow, t + 1)));
      }
      stmatrix_x4(address ^ 64u * half, rounded);
    }
  }

  // Whether each query of the tile sees all keys of the block.
  __device__ __forceinline__ bool all_see(int stage, int tile, const Block& block) const {
    const int query = tile * kQueries;
    const int last_begin = uniform(s_.first_keys[stage][kQueries - 1]);
    if constexpr (Shape::kFar) {
      return last_begin <= block.begin && block.begin + kStickKeys <= x_.p.tokens;
    }
    return query + kQueries <= x_.p.tokens && last_begin <= block.begin &&
           block.begin + kStickKeys <= query + (x_.p.attend_current ? 1 : 0);
  }

  static constexpr auto kDescriptors = kD == 64 ? Descriptors::kStepped : Descriptors::kFormed;
  using Queries = TileOperand<kQueries, kD, TileUse::kRows, kDescriptors>;
  using QueryColumns = TileOperand<kQueries, kD, TileUse::kColumns, kDescriptors>;
  using Keys = TileOperand<kStickKeys, kD, TileUse::kRows, kDescriptors>;
  using DqKeyColumns = TileOperand<kStickKeys, Shape::kDqChannels, TileUse::kColumns, kDescriptors>;
  using ScoreRows = TileOperand<kQueries, kStickKeys, TileUse::kRows, kDescriptors>;
  using ScoreColumns = TileOperand<kQueries, kStickKeys, TileUse::kColumns, kDescriptors>;

  __device__ __forceinline__ void issue_scores(TileScores& x, int stage) {
    x.s.pin();
    wgmma_fence();
    issue_product<kD>(x.s, Queries(s_.q[stage]), Keys(s_.k[index_]));
    wgmma_commit();
  }
  // dp = do v^T
  __device__ __forceinline__ void issue_value_products(TileScores& x, int stage) {
    x.dp.pin();
    wgmma_fence();
    issue_product<kD>(x.dp, Queries(s_.dout[stage]), Keys(s_.v[index_]));
    wgmma_commit();
  }
  // dq of the tile whose dz was stored last, from all keys.
  __device__ __forceinline__ void issue_query_gradient(TileScores& x) {
    s_.differentiated[scores_.stage()].wait(scores_.parity());
    QueryGradient& dq = x.dq();
    dq.pin();
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Shape::kConsumers; ++i) {
      issue_product<kStickKeys>(dq, ScoreRows(s_.dz[scores_.stage()][i]),
                                DqKeyColumns(s_.k[i] + first_dq_channel() * kStickKeys), i > 0);
    }
    wgmma_commit();
  }
  // Of dq of a tile, which wide heads divide among the consumers.
  __device__ __forceinline__ int first_dq_channel() const {
    return Shape::kWide ? index_ * Shape::kDqChannels : 0;
  }
  // Gives it to the warp that adds.
  __device__ __forceinline__ void stage_query_gradient(const QueryGradient& dq) {
    // It is filled once for each tile, and scores are a tile ahead.
    const auto tile =
        static_cast<uint32_t>(Shape::kScoreTiles == 2 ? scores_.stage() : scores_.parity());
    s_.staged.acquire({tile ^ 1});
    save_sums(
        s_.dq + first_dq_channel() * kQueries + threadIdx.x % 128 / 32 * (16 * Shape::kDqChannels),
        dq);
    fence_async_proxy();
    arrive_as_warp(s_.staged.full[0]);
  }
  // Adds what the tiles of scores contribute, which belong to the queries of `stage`.
  __device__ __forceinline__ void issue_gradients(Gradients& sums, int stage) {
    sums.pin();
    wgmma_fence();
    issue_product<kQueries>(sums.dv, ScoreColumns(s_.a[scores_.stage()][index_]),
                            QueryColumns(s_.dout[stage]), true);
    issue_product<kQueries>(sums.dk, ScoreColumns(s_.dz[scores_.stage()][index_]),
                            QueryColumns(s_.q[stage]), true);
    wgmma_commit();
  }
  // dk and dv, or what the head adds to those of its group.
  __device__ __forceinline__ void write(Gradients& sums, const Block& block, int head) const {
    if constexpr (Shape::kGated) {
      if (x_.dkv != nullptr) {
        save_sums(x_.sums_of<kD>(head, block.begin, 0), sums.dk);
        save_sums(x_.sums_of<kD>(head, block.begin, 1), sums.dv);
        return;
      }
    }
    if constexpr (Shape::kFar) {
      add_far_key_gradients<kD>(x_.p, head, sums.dk, sums.dv, block.begin, block.first_key);
    } else {
      write_key_gradients<kD>(x_.p, head, sums.dk, sums.dv, block.begin, block.first_key);
    }
  }

  Shared& s_;
  const SinglePassArguments& x_;
  const int index_;
  PipelineState<Shape::kStages> state_;
  PipelineState<Shape::kScoreTiles> scores_;
};

template <typename Shape>
static __global__ void __launch_bounds__(Shape::kThreads, 1)
    single_pass_hopper_kernel(const __grid_constant__ SinglePassArguments x) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  static_assert(kRegistersSuffice<Shape>);
  extern __shared__ unsigned char memory[];
  auto& shared = aligned_shared<SinglePassShared<Shape>>(memory);
  if (threadIdx.x == 0) {
    shared.init();
    fence_mbarrier_init();
  }
  __syncthreads();
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / 128);
  if (warpgroup == 0) {
    setmaxnreg_decrease<Shape::kProducerRegisters>();
    SinglePassHelper<Shape>(shared, x).run();
  } else {
    setmaxnreg_increase<Shape::kConsumerRegisters>();
    SinglePassConsumer<Shape>(shared, x, warpgroup - 1).run();
  }
#else
  __trap();
#endif
}

}  // namespace sbtrain::kernels
