// The score of FIRE (arXiv 2310.04418): the scaled product plus a piecewise linear function of the
// distance, see fire.h; and the gradients of its parameters.
#pragma once

#include "kernels/attention/fire.h"
#include "kernels/attention/score_scaled.cuh"
#include "kernels/primitives/accumulator.cuh"
#include "kernels/primitives/async_copy.cuh"
#include "kernels/primitives/math.cuh"

namespace sbtrain::kernels {

// What the kernels read, in scratch: see fire.h and fire_scratch.
struct FireTables {
  FireDistance* distances;  // from -kFireMargin on
  float* r_T;               // 0 beyond the pack
  FireQuery* queries_T;     // backward; 0 beyond the pack
  float* breaks_K;          // ascending
  float2* lines_HS;         // slope and intercept of each segment, in units of ln 2
  float* bends_HK;          // at the breaks, in units of ln 2
};

// The network of one head as a warp sees it: lane k holds break k and what the line bends by there.
class FireHead {
 public:
  __device__ __forceinline__ FireHead(const FireTables& tables, int head)
      : lines_(tables.lines_HS + head * (kFireUnits + 1)),
        bend_(tables.bends_HK[head * kFireUnits + lane()]),
        break_(tables.breaks_K[lane()]) {}

  // How many breaks lie below every u of a tile, and how many below its highest u.
  struct Breaks {
    int low, high;
  };
  __device__ __forceinline__ Breaks breaks(float low, float high) const {
    return {__popc(__ballot_sync(~0u, break_ < low)), __popc(__ballot_sync(~0u, break_ < high))};
  }
  // Products become scores: those of one line, then those of the bends.
  template <int kSign, int kRows, int kColBlocks, typename Tile, typename OfQuery,
            typename OfDistance>
  __device__ __forceinline__ void score(Tile& s, float scale, const Breaks& breaks, OfQuery&& r,
                                        OfDistance&& psi) const {
    const float2 first = line(breaks.low);
    fire_score<kSign, kRows, kColBlocks>(s, scale, first.x, first.y, r, psi);
#pragma unroll 1
    for (int k = breaks.low; k < breaks.high; ++k) {
      fire_bend_score<kSign, kRows, kColBlocks>(s, at(k), bend(k), r, psi);
    }
  }
  __device__ __forceinline__ float2 line(int segment) const {
    return __ldg(lines_ + segment);
  }
  __device__ __forceinline__ float bend(int rank) const {
    return __shfl_sync(~0u, bend_, rank);
  }
  __device__ __forceinline__ float at(int rank) const {
    return __shfl_sync(~0u, break_, rank);
  }

 private:
  const float2* lines_;
  float bend_, break_;
};

struct FireScore {
  static constexpr bool kOfHead = true;
  static constexpr bool kExactDelta = true;  // errors of a row would all go into few sums
  float scale_log2;
  FireTables tables;
  float* partials;  // [H, blocks, kFireSums], for each block of keys
  int blocks;

  template <typename Shape>
  class QueryRows {
    static constexpr int kRows = 2 * Shape::kRowBlocks, kWarpQueries = 16 * Shape::kRowBlocks;
    static constexpr int kColBlocks = Shape::kKeys / 8;
    using Diagonals = FireDiagonals<kRows, kColBlocks>;
    // The distances of a block and a tile of keys, beginning with that of the first query and the
    // key after the last.
    static constexpr int kDistances = Shape::kQueries + Shape::kKeys;

   public:
    static constexpr int stage_bytes() {
      return kDistances * static_cast<int>(sizeof(FireDistance));
    }

    __device__ __forceinline__ QueryRows(const FireScore& policy, const TileCoordinates& at)
        : policy_(policy),
          head_(policy.tables, at.head),
          first_(at.first),
          warp_row_(at.warp_row),
          r_(policy.tables.r_T[at.first + at.warp_row + lane() % kWarpQueries]) {}
    template <typename Group>
    __device__ __forceinline__ void load(const Group& group, void* stage, int begin) {
      copy_bytes<stage_bytes()>(
          group, stage, policy_.tables.distances + kFireMargin + first_ - begin - Shape::kKeys);
    }
    __device__ __forceinline__ void enter(const void* stage, int) {
      // The lowest u: the first query and the last key. The highest: the last query, the first key.
      const FireDistance* const first_key =
          static_cast<const FireDistance*>(stage) + Shape::kKeys + warp_row_;
      const float low_r = warp_min(r_), high_r = warp_max(r_);
      flat_ = low_r == high_r;
      breaks_ = head_.breaks(first_key[1 - Shape::kKeys].psi * low_r,
                             first_key[kWarpQueries - 1].psi * high_r);
      lane_ = first_key + lane_row() - lane_col();
    }
    template <typename Tile>
    __device__ __forceinline__ void score(Tile& s) {
      if (flat_) {
        Diagonals bias;
        const auto r = [&](int, int, int) { return r_; };
        const auto psi = [&](int offset) { return lane_[offset - 8 * (kColBlocks - 1)].psi; };
        head_.template score<1, Diagonals::kDiagonals, 1>(bias, 1.0f, breaks_, r, psi);
        bias.for_each(s, [&](float& x, float y) { x = fmaf(x, policy_.scale_log2, y); });
        return;
      }
      float r_of[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) r_of[i] = of_lane_row(r_, i);
      const auto r = [&](int i, int, int) { return r_of[i]; };
      const auto psi = [&](int offset) { return lane_[offset].psi; };
      head_.template score<1, kRows, kColBlocks>(s, policy_.scale_log2, breaks_, r, psi);
    }

   private:
    const FireScore& policy_;
    FireHead head_;
    int first_, warp_row_;
    float r_;  // of this lane's query
    // State of the current tile.
    bool flat_ = false;  // all r are the same
    FireHead::Breaks breaks_{0, 0};
    const FireDistance* lane_ = nullptr;
  };

  template <typename Shape>
  class KeyRows {
    static constexpr int kRows = 2 * Shape::kRowBlocks, kWarpKeys = 16 * Shape::kRowBlocks;
    static constexpr int kColBlocks = Shape::kQueries / 8;
    using Diagonals = FireDiagonals<kRows, kColBlocks>;
    struct Stage {
      FireQuery queries[Shape::kQueries];
      // The distances of a block and a tile of queries, beginning with that of the first query and
      // the key after the last.
      FireDistance distances[Shape::kKeys + Shape::kQueries];
    };

   public:
    static constexpr int stage_bytes() { return static_cast<int>(sizeof(Stage)); }
    static constexpr int shared_bytes() {
      return Shape::kWarps * FireSlot::kSlots * static_cast<int>(sizeof(float2));
    }

    __device__ __forceinline__ KeyRows(const FireScore& policy, const TileCoordinates& at)
        : policy_(policy), head_(policy.tables, at.head), at_(at) {}

    template <typename Group>
    __device__ __forceinline__ void load(const Group& group, void* stage, int begin) {
      Stage& to = *static_cast<Stage*>(stage);
      copy_bytes<sizeof(to.queries)>(group, to.queries, policy_.tables.queries_T + begin);
      copy_bytes<sizeof(to.distances)>(
          group, to.distances,
          policy_.tables.distances + kFireMargin + begin - at_.first - Shape::kKeys);
    }
    __device__ __forceinline__ void enter(const void* stage, int) {
      const Stage& tile = *static_cast<const Stage*>(stage);
      const FireQuery one = tile.queries[0];
      float low_r = one.r, high_r = one.r;
      bool same = true;
#pragma unroll
      for (int i = 0; i < Shape::kQueries; i += 32) {
        const FireQuery x = tile.queries[min(i + lane(), Shape::kQueries - 1)];
        low_r = fminf(low_r, x.r);
        high_r = fmaxf(high_r, x.r);
        same = same && x.r == one.r && x.by_c == one.by_c && x.by_m == one.by_m;
      }
      flat_ = __all_sync(~0u, same);
      // The lowest u: the last key and the first query. The highest: the first key, the last query.
      const FireDistance* const first_key = tile.distances + Shape::kKeys - at_.warp_row;
      breaks_ = head_.breaks(first_key[1 - kWarpKeys].psi * warp_min(low_r),
                             first_key[Shape::kQueries - 1].psi * warp_max(high_r));
      lane_ = first_key + lane_col() - lane_row();
      queries_ = tile.queries + lane_col();
    }

    template <typename Tile>
    __device__ __forceinline__ void score(Tile& s) {
      if (flat_) {
        Diagonals bias;
        const float one = queries_->r;
        const auto r = [&](int, int, int) { return one; };
        const auto psi = [&](int offset) { return lane_[offset + 8 * (kColBlocks - 1)].psi; };
        head_.template score<-1, Diagonals::kDiagonals, 1>(bias, 1.0f, breaks_, r, psi);
        bias.for_each(s, [&](float& x, float y) { x = fmaf(x, policy_.scale_log2, y); });
        return;
      }
      const auto r = [&](int, int c, int odd) { return queries_[c * 8 + odd].r; };
      const auto psi = [&](int offset) { return lane_[offset].psi; };
      head_.template score<-1, kRows, kColBlocks>(s, policy_.scale_log2, breaks_, r, psi);
    }

    template <typename Group>
    __device__ __forceinline__ void begin_gradient(const Group& group, void* shared) {
      mine_ = static_cast<float2*>(shared) + group.warp() * FireSlot::kSlots;
      for (int i = lane(); i < FireSlot::kSlots; i += 32) mine_[i] = make_float2(0.0f, 0.0f);
      __syncwarp();
    }

    // Masked pairs and queries beyond the pack have dz = 0.
    template <typename Tile>
    __device__ __forceinline__ void add_gradient(Tile& dz) {
      if (breaks_.low != segment_) flush(breaks_.low);
      if (flat_) {
        Diagonals sums;
        sums.for_each(dz, [](float x, float& sum) { sum += x; });
        const FireQuery one = *queries_;
        const auto of_distance = [&](int offset) { return lane_[offset + 8 * (kColBlocks - 1)]; };
        add_sums<Diagonals::kDiagonals, 1>(
            sums, [&](int, int) { return one; }, of_distance);
      } else {
        const auto query = [&](int c, int odd) { return queries_[c * 8 + odd]; };
        const auto of_distance = [&](int offset) { return lane_[offset]; };
        add_sums<kRows, kColBlocks>(dz, query, of_distance);
      }
    }

    // Writes the block's sums.
    template <typename Group>
    __device__ __forceinline__ void end_gradient(const Group& group) {
      flush(segment_);
      add_to_slot(FireSlot::parameters(), dc_ / kLog2e, dm_ / kLog2e);
      group.sync();
      float* const to = policy_.partials + (static_cast<int64_t>(at_.head) * policy_.blocks +
                                            at_.first / Shape::kKeys) *
                                               int64_t{kFireSums};
      const float* const sums =
          reinterpret_cast<const float*>(mine_ - group.warp() * FireSlot::kSlots);
      for (int i = group.thread(); i < kFireSums; i += Group::kThreads) {
        float sum = 0.0f;
        for (int warp = 0; warp < Shape::kWarps; ++warp) sum += sums[warp * kFireSums + i];
        to[i] = sum;
      }
    }

   private:
    template <int kTileRows, int kTileCols, typename Tile, typename OfQuery, typename OfDistance>
    __device__ __forceinline__ void add_sums(Tile& dz, OfQuery&& query, OfDistance&& of_distance) {
      const FireTileSums all =
          fire_tile_sums<true, kTileRows, kTileCols>(dz, 0.0f, query, of_distance);
      dz_ += all.dz;
      dz_u_ += all.dz_u;
      add_slope(all, head_.line(segment_).x);
#pragma unroll 1
      for (int k = breaks_.low; k < breaks_.high; ++k) {
        const FireTileSums behind =
            fire_tile_sums<false, kTileRows, kTileCols>(dz, head_.at(k), query, of_distance);
        add_slope(behind, head_.bend(k));
        add_to_slot(FireSlot::behind(k), behind.dz, behind.dz_u);
      }
    }
    // Even lanes add up x, odd ones y; only lanes 0 and 1 access the warp's sums.
    __device__ __forceinline__ void add_to_slot(int slot, float x, float y) {
      const bool odd = lane() % 2 != 0;
      const float theirs = __shfl_xor_sync(~0u, odd ? x : y, 1);
      float sum = (odd ? y : x) + theirs;
#pragma unroll
      for (int offset = 16; offset > 1; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
      if (lane() < 2) reinterpret_cast<float*>(mine_ + slot)[lane()] += sum;
    }
    __device__ __forceinline__ void flush(int next) {
      add_to_slot(FireSlot::segment(segment_), dz_, dz_u_);
      dz_ = dz_u_ = 0.0f;
      segment_ = next;
    }
    // Slopes are in units of ln 2.
    __device__ __forceinline__ void add_slope(const FireTileSums& sums, float slope) {
      dc_ = fmaf(slope, sums.dc, dc_);
      dm_ = fmaf(slope, sums.dm, dm_);
    }

    const FireScore& policy_;
    FireHead head_;
    TileCoordinates at_;
    // State of the current tile.
    bool flat_ = false;  // all queries are the same to FIRE
    FireHead::Breaks breaks_{0, 0};
    const FireDistance* lane_ = nullptr;
    const FireQuery* queries_ = nullptr;
    // State of the gradient: the lane's sums over consecutive tiles in one segment.
    float2* mine_ = nullptr;  // the warp's sums
    int segment_ = 0;
    float dz_ = 0.0f, dz_u_ = 0.0f, dc_ = 0.0f, dm_ = 0.0f;
  };
};

}  // namespace sbtrain::kernels
