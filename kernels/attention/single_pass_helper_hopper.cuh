// The warpgroup that loads, passes states on and adds dq in the stick-breaking backward pass in a
// single pass (sm_90a).
#pragma once

#include "kernels/attention/single_pass_shared_hopper.cuh"

namespace sbtrain::kernels {

// Warp 0 takes blocks and loads keys and queries, warp 1 fetches states, warp
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
    const float sum = x.x + x.y + x.z;
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

}  // namespace sbtrain::kernels
