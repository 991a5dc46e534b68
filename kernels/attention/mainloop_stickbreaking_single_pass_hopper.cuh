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
//
// The consumers compute dq of a tile in turns, from dz of all 192 keys. A fourth warpgroup loads,
// passes states on and adds dq to sums in device memory, block after block from left to right, so
// that the bits are the same on every run. The first block stores the sums
// (single_pass_helper_hopper.cuh).
//
// With gates, scores become their odds e' and stay that (score_stickbreaking.cuh): the gradient of
// log f is y = g - e' C, and dz follows from it. beta would not do, since near a whole stick 1 -
// beta loses all digits. What pairs of keys leave, on which A and dz depend, is kept in the tile of
// dz until dz takes its place.
#pragma once

#include "kernels/attention/single_pass_helper_hopper.cuh"

namespace sbtrain::kernels {

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
  using QueryGradient = WarpgroupAccumulator<kD>;
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
      sync_consumers();  // logs are complete
      s_.arrived[stage].wait(state_.parity());
      const float sticks[2] = {stick<0>(rows, stage), stick<1>(rows, stage)};
      wait_for_products<0>();
      x.pin_products();
      sums.pin();
      if (before >= 0) s_.queries.release(before);
      if (has_dq) {
        stage_query_gradient(x.dq());
        if constexpr (!kOwnDq) {
          issue_value_products(x, stage);
          wait_for_products<0>();
          x.dp.pin();
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
      has_dq = stage == index_;
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
  using KeyColumns = TileOperand<kStickKeys, kD, TileUse::kColumns, kDescriptors>;
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
      issue_product<kStickKeys>(dq, ScoreRows(s_.dz[scores_.stage()][i]), KeyColumns(s_.k[i]),
                                i > 0);
    }
    wgmma_commit();
  }
  // Gives it to the warp that adds.
  __device__ __forceinline__ void stage_query_gradient(const QueryGradient& dq) {
    // One stage is filled for each tile, and scores are a tile ahead.
    s_.staged.acquire({static_cast<uint32_t>(scores_.stage() ^ 1)});
    save_sums(s_.dq + threadIdx.x % 128 / 32 * (16 * kD), dq);
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
