// The stick-breaking backward pass for sm_90a in a single pass: five products and one scan for each
// pair of query and key, where the two phases take seven and two
// (mainloop_stickbreaking_query_gradient_hopper.cuh).
//
// A block of threads owns 192 keys, whose K and V stay in shared memory, and walks over the tiles
// of 64 queries that see them, from the last to the first. Each of its three consumers owns 64 of
// the keys. Of a row they need log2 T and C at the left of their keys: what comes from the block of
// keys further left, through device memory behind a counter for each tile, and what the consumers
// further left contribute. Every consumer says what its own keys leave of the stick as soon as it
// knows it, and later what they add to C, so none waits for another's state, only for two barriers.
// Blocks take keys from left to right, all heads of one place first: what they wait for runs
// already.
//
// The fourth warpgroup loads, passes states on and computes dq: it multiplies dz of all 192 keys by
// K and adds the product to sums in device memory, after the block further left.
#pragma once

#include "kernels/attention/stickbreaking_backward_hopper.cuh"
#include "kernels/primitives/flag.cuh"

namespace sbtrain::kernels {

// What distinguishes the forms of the kernel that are measured.
struct SinglePassOptions {
  static constexpr int kEarlyValues = 1;    // dv is issued before dz is known
  static constexpr int kSplitScores = 2;    // e is computed while do v^T is under way
  static constexpr int kWideBarriers = 4;   // consumers meet as a whole, not by rows
  static constexpr int kQueryGradient = 8;  // without it dq is left out, which is wrong
  static constexpr int kRelaxed = 32;       // consumers wait for those further left alone
  static constexpr int kClamped = 64;       // e always is, so that no vote divides the code
  static constexpr int kScoresFirst = 16;   // dp of the next tile is issued before dk and dv
};

template <int kHeadDim, int kOptions>
struct SinglePassShape {
  static constexpr int kD = kHeadDim;
  static constexpr bool kFolded = true;
  static constexpr int kConsumers = 3;
  static constexpr int kKeys = kStickKeys * kConsumers;
  static constexpr int kQueries = 64;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kStages = 3;
  static constexpr int kScoreTiles = 2;  // of A and dz
  static constexpr bool kEarlyValues = (kOptions & SinglePassOptions::kEarlyValues) != 0;
  static constexpr bool kSplitScores = (kOptions & SinglePassOptions::kSplitScores) != 0;
  static constexpr bool kWideBarriers = (kOptions & SinglePassOptions::kWideBarriers) != 0;
  static constexpr bool kClamped = (kOptions & SinglePassOptions::kClamped) != 0;
  static constexpr bool kRelaxed = (kOptions & SinglePassOptions::kRelaxed) != 0;
  static constexpr bool kQueryGradient = (kOptions & SinglePassOptions::kQueryGradient) != 0;
  static constexpr bool kScoresFirst =
      !kSplitScores || (kOptions & SinglePassOptions::kScoresFirst) != 0;
  static constexpr int kProducerRegisters = 32;
  static constexpr int kConsumerRegisters = 160;
};

struct SinglePassArguments {
  StickBreakingProblem p;
  int tiles = 0;              // of queries
  int places = 0;             // of 192 keys
  int* taken = nullptr;       // how many blocks of keys have been taken
  int* first_keys = nullptr;  // [64 tiles]: that each row sees
  float2* states = nullptr;   // {log2 T, C} [H, 64 tiles], at the left of the place that is next
  int* next = nullptr;        // [H, tiles]: the place that is next to take the states
  int* next_dq = nullptr;     // [H, tiles]: and to add to dq
  float* dq = nullptr;        // [H, tiles, 64 d], as the lanes hold it (save_sums)
  CUtensorMap q, dout, k, v;  // of 64 queries or keys
  __host__ __device__ __forceinline__ int64_t tile(int head, int tile) const {
    return static_cast<int64_t>(head) * tiles + tile;
  }
};

// A block of 192 keys, and the tiles of queries that see it.
struct SinglePassTile : KeyTile {
  int begin = 0, last = 0;
  int place = 0;
};
__device__ __forceinline__ SinglePassTile uniform(const SinglePassTile& x) {
  return {uniform(static_cast<const KeyTile&>(x)), uniform(x.begin), uniform(x.last),
          uniform(x.place)};
}

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
  alignas(128) float dq[Shape::kQueryGradient ? kQueries * kD : 32];
  // Of each row: log2 of what the keys of each consumer leave of the stick, and what they add to C.
  alignas(16) float logs[kStages][kQueries][4];
  alignas(16) float sums[kStages][kQueries][4];
  alignas(16) float2 states[kStages][kQueries];
  alignas(16) int first_keys[kStages][kQueries];
  Pipeline<1> keys, tiles;
  Pipeline<kStages> queries;
  Mbarrier arrived[kStages];                    // the states have
  Mbarrier handed[kStages];                     // logs and sums are complete
  Mbarrier differentiated[Shape::kScoreTiles];  // dz of all keys is complete
  Pipeline<1> staged;                           // dq
  SinglePassTile tile;

  __device__ __forceinline__ void init() {
    constexpr int kWarps = 4 * kConsumers;
    tiles.init(1, kWarps + 3);
    keys.init(1, kWarps);
    queries.init(1, kWarps + 1);
    for (int i = 0; i < kStages; ++i) {
      arrived[i].init(1);
      handed[i].init(kWarps);
    }
    for (Mbarrier& barrier : differentiated) barrier.init(kWarps);
    staged.init(4, 1);
  }
};

// The fourth warpgroup. Warp 0 loads keys and queries, warp 1 fetches states, warp 2 passes them on
// and warp 3 adds dq; all four multiply.
template <typename Shape>
class SinglePassHelper {
  static constexpr int kD = Shape::kD, kQueries = Shape::kQueries;
  using Shared = SinglePassShared<Shape>;

 public:
  __device__ __forceinline__ SinglePassHelper(Shared& shared, const SinglePassArguments& x)
      : s_(shared), x_(x), warp_(uniform(static_cast<int>(threadIdx.x) / 32)) {}

  __device__ __forceinline__ void run() {
    while (next_block()) {
      const int begin = uniform(s_.tile.begin);
      int tile = uniform(s_.tile.last);
      if (warp_ == 0) begin_loads(tile, begin);
      if (warp_ == 1) fetch_states(tile);
#pragma unroll 1
      for (; tile >= begin; --tile) {
        if (warp_ == 0 && tile - 2 >= begin) load_queries(tile - 2);
        if (warp_ == 1 && tile > begin) fetch_states(tile - 1);
        if (warp_ == 2) pass_states_on(tile);
        if (Shape::kQueryGradient && warp_ == 3) add_query_gradient(tile);
      }
      if (warp_ != 0) s_.tiles.release();
      blocks_.advance();
    }
  }

 private:
  // The block is read again from shared memory where it is used, since threads have few registers.
  __device__ __forceinline__ bool next_block() {
    if (warp_ == 0) {
      Mbarrier& full = s_.tiles.acquire(blocks_);
      if (lane() == 0) {
        s_.tile = take_block();
        full.arrive();
      }
      __syncwarp();
    } else {
      s_.tiles.wait(blocks_);
    }
    return uniform(s_.tile.first) >= 0;
  }
  __device__ __forceinline__ SinglePassTile take_block() const {
    const StickBreakingProblem& p = x_.p;
    const int n = atomicAdd(x_.taken, 1);
    const int place = n / p.heads;
    if (place >= x_.places) return {};
    const int first = place * Shape::kKeys;
    const int end_key = min(first + Shape::kKeys, p.tokens);
    const int end = visibility_of<false>(p, StickHead(p, 0)).end_query(end_key - 1);
    return {{first, n % p.heads}, first / kQueries, (end - 1) / kQueries, place};
  }

  // ---- Warp 0 ----
  __device__ __forceinline__ void begin_loads(int last, int begin) {
    load_queries(last);
    load_keys();
    if (last > begin) load_queries(last - 1);
  }
  __device__ __forceinline__ void load_keys() {
    Mbarrier& full = s_.keys.acquire(blocks_);
    if (lane() == 0) {
      full.arrive_and_expect(2 * 2 * Shape::kKeys * kD);
      for (int i = 0; i < Shape::kConsumers; ++i) {
        const int first = first_loaded_key<kStickKeys>(s_.tile.first + i * kStickKeys, x_.p.tokens);
        load_key_tile<kStickKeys, kD>(s_.k[i], x_.k, full, first, s_.tile.head);
        load_key_tile<kStickKeys, kD>(s_.v[i], x_.v, full, first, s_.tile.head);
      }
    }
    __syncwarp();
  }
  __device__ __forceinline__ void load_queries(int tile) {
    const int stage = queries_.stage();
    Mbarrier& full = s_.queries.acquire(queries_);
    if (lane() == 0) {
      const int first = tile * kQueries;
      full.arrive_and_expect(2 * 2 * kQueries * kD + static_cast<int>(sizeof(s_.first_keys[0])));
      load_token_tile<kQueries, kD>(s_.q[stage], x_.q, full, first, s_.tile.head);
      load_token_tile<kQueries, kD>(s_.dout[stage], x_.dout, full, first, s_.tile.head);
      bulk_load(s_.first_keys[stage], x_.first_keys + first, sizeof(s_.first_keys[0]), full);
    }
    __syncwarp();
    queries_.advance();
  }

  // ---- Warps 1 and 2: a lane has two rows ----
  __device__ __forceinline__ float4* states_of(int tile) const {
    return reinterpret_cast<float4*>(x_.states + x_.tile(s_.tile.head, tile) * kQueries) + lane();
  }
  __device__ __forceinline__ void fetch_states(int tile) {
    const int stage = queries_.stage();
    s_.queries.acquire(queries_);
    if (lane() == 0) wait_for_value(x_.next + x_.tile(s_.tile.head, tile), s_.tile.place);
    __syncwarp();
    reinterpret_cast<float4*>(s_.states[stage])[lane()] = __ldcg(states_of(tile));
    arrive_as_warp(s_.arrived[stage]);
    queries_.advance();
  }
  __device__ __forceinline__ void pass_states_on(int tile) {
    const int stage = queries_.stage();
    s_.handed[stage].wait(queries_.parity());
    float4 states = reinterpret_cast<const float4*>(s_.states[stage])[lane()];
    states.x -= sum_of(s_.logs[stage][2 * lane()]);
    states.y += sum_of(s_.sums[stage][2 * lane()]);
    states.z -= sum_of(s_.logs[stage][2 * lane() + 1]);
    states.w += sum_of(s_.sums[stage][2 * lane() + 1]);
    *states_of(tile) = states;
    __syncwarp();
    if (lane() == 0) {
      store_release(x_.next + x_.tile(s_.tile.head, tile), s_.tile.place + 1);
      s_.queries.empty[stage].arrive();
    }
    __syncwarp();
    queries_.advance();
  }
  static __device__ __forceinline__ float sum_of(const float (&of_consumers)[4]) {
    const float4 x = *reinterpret_cast<const float4*>(of_consumers);
    return x.x + x.y + x.z;
  }

  // ---- Warp 3: adds what a consumer has staged, and says so when it is there ----
  __device__ __forceinline__ void add_query_gradient(int tile) {
    if (lane() == 0) {
      const int64_t at = x_.tile(s_.tile.head, tile);
      wait_for_value(x_.next_dq + at, s_.tile.place);
      s_.staged.wait(staged_);
      fence_all_proxies();
      bulk_add(x_.dq + at * (kQueries * kD), s_.dq, sizeof(s_.dq));
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
  const int warp_;
  PipelineState<1> blocks_;
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
      s_.tiles.wait(blocks_);
      const SinglePassTile block = uniform(s_.tile);
      s_.tiles.release();
      if (block.first < 0) return;
      compute(block);
      blocks_.advance();
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
  struct TileScores {
    Scores s, dp;
  };
  struct Block {
    int begin, first_key;  // of the keys, and the first one that is loaded
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
    TileScores x;
    s_.keys.wait(blocks_);
    s_.queries.wait(state_);
    issue_scores(x, state_.stage());
    issue_value_products(x, state_.stage());
    wait_for_products<0>();
    bool has_dq = false;  // dp holds dq of the tile before
#pragma unroll 1
    for (int tile = tiles.last;; --tile) {
      const int stage = state_.stage();
      const bool masked = !all_see(stage, tile, block);
      Rows rows;
      x.s.pin();
      if (!Shape::kSplitScores) x.dp.pin();
      exponentials(x.s);
      if (masked) hide(x.s, stage, tile * kQueries, block);
      meet_keys<0>(x.s, rows, stage);
      meet_keys<1>(x.s, rows, stage);
      sync_logs();
      s_.arrived[stage].wait(state_.parity());
      const float sticks[2] = {stick<0>(rows, stage), stick<1>(rows, stage)};
      if (Shape::kSplitScores) {
        wait_for_products<0>();
        x.dp.pin();
        sums.pin();
      }
      if (Shape::kQueryGradient && has_dq) {
        stage_query_gradient(x.dp);
        issue_value_products(x, stage);
        wait_for_products<0>();
        x.dp.pin();
      }
      break_stick<0>(x, rows, sticks[0], stage);
      break_stick<1>(x, rows, sticks[1], stage);
      if (!Shape::kSplitScores) {
        wait_for_products<0>();
        sums.pin();
      }
      if (tile < tiles.last) s_.queries.release(stage == 0 ? Shape::kStages - 1 : stage - 1);
      arrive_as_warp(s_.handed[stage]);
      if (Shape::kEarlyValues) fence_async_proxy();
      sync_sums();
      if (Shape::kEarlyValues) issue_values(sums, stage);
      differentiate<0>(x, rows, stage);
      differentiate<1>(x, rows, stage);
      fence_async_proxy();
      if (Shape::kQueryGradient) arrive_as_warp(s_.differentiated[scores_.stage()]);
      sync_threads<128>(kScores + index_);
      state_.advance();
      if (Shape::kQueryGradient) {
        has_dq = turn_ == index_;
        turn_ = turn_ == Shape::kConsumers - 1 ? 0 : turn_ + 1;
      }
      if (tile == tiles.begin) {
        issue_gradients(sums, stage);
        if (Shape::kQueryGradient && has_dq) issue_query_gradient(x);
        wait_for_products<0>();
        sums.pin();
        if (Shape::kQueryGradient) {
          x.dp.pin();
          if (has_dq) {
            stage_query_gradient(x.dp);
          } else {
            staged_.advance();
          }
        }
        scores_.advance();
        s_.queries.release(stage);
        break;
      }
      s_.queries.wait(state_);
      issue_scores(x, state_.stage());
      if (Shape::kQueryGradient && has_dq) {
        issue_gradients(sums, stage);
        issue_query_gradient(x);
      } else {
        if (Shape::kScoresFirst) issue_value_products(x, state_.stage());
        issue_gradients(sums, stage);
        if (!Shape::kScoresFirst) issue_value_products(x, state_.stage());
        staged_.advance();
      }
      scores_.advance();
      wait_for_products<Shape::kSplitScores ? 2 : 1>();
    }
    s_.keys.release();
    write(sums, block, tiles.head);
  }

  static constexpr int kLogs = 1, kSums = 5, kScores = 9, kLogsOfTwo = 12;  // barriers
  // Logs are complete. The warps that have the same rows meet, or all of them. Without
  // kWideBarriers a warp may pass by those that wait for it: it waits for all of them when it knows
  // its sums.
  __device__ __forceinline__ void sync_logs() const {
    if constexpr (Shape::kWideBarriers) return sync_threads<128 * Shape::kConsumers>(kLogs);
    const int row = uniform(static_cast<int>(threadIdx.x) / 32) % 4;
    if constexpr (Shape::kRelaxed) {
      if (index_ == 0) {
        arrive_threads<64>(kLogsOfTwo + row);
        arrive_threads<96>(kLogs + row);
      } else if (index_ == 1) {
        arrive_threads<96>(kLogs + row);
        sync_threads<64>(kLogsOfTwo + row);
      } else {
        sync_threads<96>(kLogs + row);
      }
    } else {
      sync_threads<96>(kLogs + row);
    }
  }
  __device__ __forceinline__ void sync_sums() const {
    if constexpr (Shape::kWideBarriers || Shape::kEarlyValues) {
      sync_threads<128 * Shape::kConsumers>(kSums);
    } else {
      sync_threads<96>(kSums + uniform(static_cast<int>(threadIdx.x) / 32) % 4);
    }
  }
  // The lane's row kRow of the tile.
  template <int kRow>
  static __device__ __forceinline__ int row() {
    return static_cast<int>(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4) + 8 * kRow;
  }

  // Scores become e.
  __device__ __forceinline__ void exponentials(Scores& s) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int t = 0; t < kLaneKeys; ++t) {
        const float z = s.of_row(i, t) * score_scale<Shape>(x_.p);
        s.of_row(i, t) = exp2_ftz(Shape::kClamped ? fminf(z, kLargestLogit) : z);
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
      const int end = query + (x_.p.attend_current ? 1 : 0) - first;
#pragma unroll
      for (int t = 0; t < kLaneKeys; ++t) {
        if (t < begin || t >= end) s.of_row(i, t) = 0.0f;
      }
    }
  }
  // e becomes beta = e / (1 + e). What the keys leave of the stick is said to the others.
  template <int kRow>
  __device__ __forceinline__ void meet_keys(Scores& s, Rows& rows, int stage) {
    float e[kLaneKeys], kept[2 * kGroups], all[kGroups];
#pragma unroll
    for (int t = 0; t < kLaneKeys; ++t) e[t] = s.of_row(kRow, t);
    float mine;
    if constexpr (Shape::kClamped) {
      HopperGradients::keep_pairs(e, kept, all);
      mine = HopperGradients::template sum_of_logarithms<1>(all);
    } else if (HopperGradients::keep_or_clamp(e, kept, all)) {
      mine = HopperGradients::template sum_of_logarithms<4>(all);
    } else {
      mine = HopperGradients::template sum_of_logarithms<1>(all);
    }
#pragma unroll
    for (int n = 0; n < 2 * kGroups; ++n) {
      const float m = e[2 * n] * kept[n];
      s.of_row(kRow, 2 * n) = fmaf(m, e[2 * n + 1], m);
      s.of_row(kRow, 2 * n + 1) = e[2 * n + 1] * (kept[n] + m);
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
  // Of the consumers further left.
  __device__ __forceinline__ float sum_left(const float (&of_consumers)[4]) const {
    float sum = 0.0f;
    if (index_ > 0) {
      const float2 x = *reinterpret_cast<const float2*>(of_consumers);
      sum = x.x;
      if (index_ > 1) sum += x.y;
    }
    return sum;
  }

  // The stick that comes to the lane's last key from the right.
  template <int kRow>
  __device__ __forceinline__ float stick(const Rows& rows, int stage) const {
    const float left = sum_left(s_.logs[stage][row<kRow>()]) + rows.log2_kept[kRow];
    return exp2_ftz(s_.states[stage][row<kRow>()].x - left);
  }

  // From beta: A is stored, and dp becomes what dz is where C at the lane's left is zero: with
  // g = A dp and P the sum of g up to a key, dz = g - beta (C + P).
  template <int kRow>
  __device__ __forceinline__ void break_stick(TileScores& x, Rows& rows, float stick, int stage) {
    const unsigned offset = score_chunk_offset();
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
      stmatrix_x4(
          shared_address(s_.a[scores_.stage()][index_]) + (offset ^ 64u * half) + 1024 * kRow,
          rounded);
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

  // Stores dz.
  template <int kRow>
  __device__ __forceinline__ void differentiate(const TileScores& x, const Rows& rows, int stage) {
    const float c =
        s_.states[stage][row<kRow>()].y + (sum_left(s_.sums[stage][row<kRow>()]) + rows.c[kRow]);
    const unsigned offset = score_chunk_offset();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t rounded[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int t = 8 * half + 2 * n;
        rounded[n] = pack_bf16(fmaf(-x.s.of_row(kRow, t), c, x.dp.of_row(kRow, t)),
                               fmaf(-x.s.of_row(kRow, t + 1), c, x.dp.of_row(kRow, t + 1)));
      }
      stmatrix_x4(
          shared_address(s_.dz[scores_.stage()][index_]) + (offset ^ 64u * half) + 1024 * kRow,
          rounded);
    }
  }

  // Whether each query of the tile sees all keys of the block.
  __device__ __forceinline__ bool all_see(int stage, int tile, const Block& block) const {
    const int query = tile * kQueries;
    const int last_begin = uniform(s_.first_keys[stage][kQueries - 1]);
    return query + kQueries <= x_.p.tokens && last_begin <= block.begin &&
           block.begin + kStickKeys <= query + (x_.p.attend_current ? 1 : 0);
  }

  static constexpr auto kDescriptors = kD == 64 ? Descriptors::kStepped : Descriptors::kFormed;
  using Queries = TileOperand<kQueries, kD, TileUse::kRows, kDescriptors>;
  using QueryColumns = TileOperand<kQueries, kD, TileUse::kColumns, kDescriptors>;
  using Keys = TileOperand<kStickKeys, kD, TileUse::kRows, kDescriptors>;
  using KeyColumns = TileOperand<kStickKeys, kD, TileUse::kColumns, kDescriptors>;
  using ScoreRows = TileOperand<kQueries, kStickKeys, TileUse::kRows, kDescriptors>;
  using ScoreColumns = TileOperand<kQueries, kStickKeys, TileUse::kColumns, kDescriptors>;
  static_assert(kD == kStickKeys || !Shape::kQueryGradient);

  __device__ __forceinline__ void issue_scores(TileScores& x, int stage) {
    x.s.pin();
    wgmma_fence();
    issue_product<kD>(x.s, Queries(s_.q[stage]), Keys(s_.k[index_]));
    if (Shape::kSplitScores) wgmma_commit();
  }
  // dp = do v^T
  __device__ __forceinline__ void issue_value_products(TileScores& x, int stage) {
    x.dp.pin();
    wgmma_fence();
    issue_product<kD>(x.dp, Queries(s_.dout[stage]), Keys(s_.v[index_]));
    wgmma_commit();
  }
  // dq of the tile whose dz was stored last, of all keys, in the registers of dp.
  __device__ __forceinline__ void issue_query_gradient(TileScores& x) {
    s_.differentiated[scores_.stage()].wait(scores_.parity());
    x.dp.pin();
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Shape::kConsumers; ++i) {
      issue_product<kStickKeys>(x.dp, ScoreRows(s_.dz[scores_.stage()][i]), KeyColumns(s_.k[i]),
                                i > 0);
    }
    wgmma_commit();
  }
  // Gives it to the warp that adds.
  __device__ __forceinline__ void stage_query_gradient(const Scores& dq) {
    s_.staged.acquire(staged_);
    save_sums(s_.dq + threadIdx.x % 128 / 32 * (16 * kD), dq);
    fence_async_proxy();
    arrive_as_warp(s_.staged.full[0]);
    staged_.advance();
  }
  // Adds what the tiles of scores contribute, which belong to the queries of `stage`.
  __device__ __forceinline__ void issue_gradients(Gradients& sums, int stage) {
    sums.pin();
    wgmma_fence();
    if (!Shape::kEarlyValues) {
      issue_product<kQueries>(sums.dv, ScoreColumns(s_.a[scores_.stage()][index_]),
                              QueryColumns(s_.dout[stage]), true);
    }
    issue_product<kQueries>(sums.dk, ScoreColumns(s_.dz[scores_.stage()][index_]),
                            QueryColumns(s_.q[stage]), true);
    wgmma_commit();
  }
  __device__ __forceinline__ void issue_values(Gradients& sums, int stage) {
    sums.dv.pin();
    wgmma_fence();
    issue_product<kQueries>(sums.dv, ScoreColumns(s_.a[scores_.stage()][index_]),
                            QueryColumns(s_.dout[stage]), true);
    wgmma_commit();
  }

  __device__ __forceinline__ void write(const Gradients& sums, const Block& block,
                                        int head_index) const {
    const StickBreakingProblem& p = x_.p;
    const StickHead head(p, head_index);
    const int warp_row = static_cast<int>(threadIdx.x / 32 % 4 * 16);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = block.first_key + key_of_row<kStickKeys>(warp_row + lane_row() + 8 * i);
      if (key < block.begin || key >= p.tokens) continue;
      __nv_bfloat16* const dk_row = head.row(p.dk, key) + lane_col();
      __nv_bfloat16* const dv_row = head.row(p.dv, key) + lane_col();
#pragma unroll
      for (int c = 0; c < kD / 8; ++c) {
        const float* const x = sums.dk.at[0][c] + 2 * i;
        const float* const y = sums.dv.at[0][c] + 2 * i;
        *reinterpret_cast<uint32_t*>(dk_row + 8 * c) = pack_bf16(x[0] * p.scale, x[1] * p.scale);
        *reinterpret_cast<uint32_t*>(dv_row + 8 * c) = pack_bf16(y[0], y[1]);
      }
    }
  }

  Shared& s_;
  const SinglePassArguments& x_;
  const int index_;
  PipelineState<1> blocks_;
  PipelineState<Shape::kStages> state_;
  PipelineState<Shape::kScoreTiles> scores_;
  PipelineState<1> staged_;
  int turn_ = 0;  // the consumer that computes dq of the tile
};

template <typename Shape>
static __global__ void __launch_bounds__(Shape::kThreads, 1)
    single_pass_kernel(const __grid_constant__ SinglePassArguments x) {
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

// ---- Before and after
// -----------------------------------------------------------------------------

// A block of 64 threads for each tile of each head: the rows' states and first keys, and the place
// that is the first to see a tile.
static __global__ void __launch_bounds__(64)
    begin_single_pass_kernel(const SinglePassArguments x, int keys) {
  const int tile = static_cast<int>(blockIdx.x), head_index = static_cast<int>(blockIdx.y);
  const int thread = static_cast<int>(threadIdx.x);
  const StickHead head(x.p, head_index);
  const int row = tile * 64 + thread;
  const int first_key = visibility_of<false>(x.p, head).first_key(row);
  const float log2_rem = row < x.p.tokens ? x.p.log2_rem[head.at(row)] : 0.0f;
  x.states[x.tile(head_index, tile) * 64 + thread] = make_float2(log2_rem, 0.0f);
  if (head_index == 0) x.first_keys[row] = first_key;
  if (thread != 0) return;
  x.next[x.tile(head_index, tile)] = first_key / keys;
  x.next_dq[x.tile(head_index, tile)] = first_key / keys;
  if (tile == 0 && head_index == 0) *x.taken = 0;
}

// A block of 128 threads for each tile of each head: rounds the sums of dq.
template <int kD>
static __global__ void __launch_bounds__(128) end_single_pass_kernel(const SinglePassArguments x) {
  const int tile = static_cast<int>(blockIdx.x), head_index = static_cast<int>(blockIdx.y);
  const StickBreakingProblem& p = x.p;
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16;
  const int first = tile * 64 + warp_row;
  WarpgroupAccumulator<kD> dq;
  load_sums(dq, x.dq + x.tile(head_index, tile) * (64 * kD) + warp_row * kD);
  const StickHead head(p, head_index);
  const float scale = p.scale * p.query_factor;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = first + lane_row() + 8 * i;
    if (row >= p.tokens) continue;
    __nv_bfloat16* const to = head.row(p.dq, row) + lane_col();
#pragma unroll
    for (int c = 0; c < kD / 8; ++c) {
      const float* const pair = dq.at[0][c] + 2 * i;
      *reinterpret_cast<uint32_t*>(to + 8 * c) = pack_bf16(pair[0] * scale, pair[1] * scale);
    }
  }
}

}  // namespace sbtrain::kernels
