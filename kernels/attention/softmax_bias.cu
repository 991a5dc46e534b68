#include <algorithm>

#include "kernels/attention/fire.h"
#include "kernels/attention/softmax.cuh"
#include "kernels/attention/softmax_bias.h"
#include "kernels/reduce.cuh"

namespace sbtrain::kernels {
namespace {

// ---- ALiBi --------------------------------------------------------------------------------------

struct AlibiScore {
  static constexpr bool kExactDelta = false;
  float scale_log2;
  AlibiSlopes slopes_log2;

  // Of a tile whose first row and column are `distance` apart, see for_each_by_distance.
  template <int kSign, int kRowBlocks, int kColBlocks>
  static __device__ __forceinline__ void score(Accumulator<kRowBlocks, kColBlocks>& s, float scale,
                                               float slope, int distance) {
    const float first = -slope * static_cast<float>(distance);
    for_each_by_distance<kSign, 2 * kRowBlocks, kColBlocks>(
        s, [&](int offset) { return fmaf(-slope, static_cast<float>(offset), first); },
        [&](float& x, float bias, int, int, int) { x = fmaf(x, scale, bias); });
  }

  template <typename Shape>
  struct QueryRows {
    static constexpr int stage_bytes() { return 0; }
    __device__ __forceinline__ QueryRows(const AlibiScore& policy, const SoftmaxProblem&, int first,
                                         int warp_row)
        : scale(policy.scale_log2),
          slope(policy.slopes_log2.of_head[blockIdx.y]),
          first(first + warp_row + lane_row() - lane_col()) {}
    __device__ __forceinline__ void load(void*, int) {}
    __device__ __forceinline__ void enter(const void*, int begin) { distance = first - begin; }
    template <typename Tile>
    __device__ __forceinline__ void score(Tile& s) {
      AlibiScore::score<1>(s, scale, slope, distance);
    }
    float scale, slope;
    int first, distance = 0;
  };
  template <typename Shape>
  struct KeyRows {
    static constexpr int stage_bytes() { return 0; }
    static constexpr int shared_bytes() { return 0; }
    __device__ __forceinline__ KeyRows(const AlibiScore& policy, const SoftmaxProblem&, int first,
                                       int warp_row)
        : scale(policy.scale_log2),
          slope(policy.slopes_log2.of_head[blockIdx.y]),
          first(first + warp_row + lane_row() - lane_col()) {}
    __device__ __forceinline__ void load(void*, int) {}
    __device__ __forceinline__ void enter(const void*, int begin) { distance = begin - first; }
    template <typename Tile>
    __device__ __forceinline__ void score(Tile& s) {
      AlibiScore::score<-1>(s, scale, slope, distance);
    }
    __device__ __forceinline__ void begin_gradient(void*) {}
    template <typename Tile>
    __device__ __forceinline__ void add_gradient(Tile&) {}
    __device__ __forceinline__ void end_gradient() {}
    float scale, slope;
    int first, distance = 0;
  };
};

// ---- FIRE ---------------------------------------------------------------------------------------

// What the kernels read, in scratch: see fire.h and fire_scratch.
struct FireTables {
  FireDistance* distances;  // from -kFireMargin on
  float* r_T;               // 0 behind the pack
  FireQuery* queries_T;     // backward; 0 behind the pack
  float* breaks_K;          // ascending
  float2* lines_HS;         // slope and intercept of each segment, in units of ln 2
  float* bends_HK;          // at the breaks, in units of ln 2
};

__device__ __forceinline__ float lowest_of_warp(float x) {  // none is negative
  return __uint_as_float(__reduce_min_sync(~0u, __float_as_uint(x)));
}
__device__ __forceinline__ float highest_of_warp(float x) {
  return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(x)));
}

// The network of one head as a warp sees it: lane k holds break k and what the line bends by there.
class FireHead {
 public:
  __device__ __forceinline__ explicit FireHead(const FireTables& tables)
      : lines_(tables.lines_HS + blockIdx.y * (kFireUnits + 1)),
        bend_(tables.bends_HK[blockIdx.y * kFireUnits + threadIdx.x % 32]),
        break_(tables.breaks_K[threadIdx.x % 32]) {}

  // How many breaks are below every u of a tile, and below its highest.
  struct Breaks {
    int low, high;
  };
  __device__ __forceinline__ Breaks breaks(float low, float high) const {
    return {__popc(__ballot_sync(~0u, break_ < low)), __popc(__ballot_sync(~0u, break_ < high))};
  }
  // Products become scores: those of one line, and bends.
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

// Copies 16 * kChunks bytes to shared memory by all threads of a block; asynchronous.
template <int kChunks, int kThreads>
__device__ __forceinline__ void copy_chunks(void* to, const void* from) {
  static_assert(kChunks <= 2 * kThreads);
#pragma unroll
  for (int first = 0; first < kChunks; first += kThreads) {
    const int i = first + static_cast<int>(threadIdx.x);
    if (i < kChunks)
      cp_async16(shared_address(to) + 16 * i, static_cast<const char*>(from) + 16 * i);
  }
}

struct FireScore {
  static constexpr bool kExactDelta = true;  // errors of a row would all go into few sums
  float scale_log2;
  FireTables tables;
  float* partials;  // [H, blocks, kFireSums]

  template <typename Shape>
  class QueryRows {
    static constexpr int kRows = 2 * Shape::kRowBlocks, kWarpQueries = 16 * Shape::kRowBlocks;
    static constexpr int kColBlocks = Shape::kKeys / 8;
    using Diagonals = FireDiagonals<kRows, kColBlocks>;
    // Of a block and its keys, from the first query to the key behind the last one on.
    static constexpr int kDistances = Shape::kQueries + Shape::kKeys;

   public:
    static constexpr int stage_bytes() {
      return kDistances * static_cast<int>(sizeof(FireDistance));
    }

    __device__ __forceinline__ QueryRows(const FireScore& policy, const SoftmaxProblem&, int first,
                                         int warp_row)
        : policy_(policy),
          head_(policy.tables),
          first_(first),
          warp_row_(warp_row),
          r_(policy.tables.r_T[first + warp_row + threadIdx.x % kWarpQueries]) {}
    __device__ __forceinline__ void load(void* stage, int begin) {
      copy_chunks<stage_bytes() / 16, Shape::kThreads>(
          stage, policy_.tables.distances + kFireMargin + first_ - begin - Shape::kKeys);
    }
    __device__ __forceinline__ void enter(const void* stage, int) {
      // The first query and the last key; the last query and the first key.
      const FireDistance* const first_key =
          static_cast<const FireDistance*>(stage) + Shape::kKeys + warp_row_;
      const float low_r = lowest_of_warp(r_), high_r = highest_of_warp(r_);
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
    float r_;  // of the query of this lane
    // Of the tile.
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
      // Of a block and its queries, from the first query to the key behind the last one on.
      FireDistance distances[Shape::kKeys + Shape::kQueries];
    };

   public:
    static constexpr int stage_bytes() { return static_cast<int>(sizeof(Stage)); }
    static constexpr int shared_bytes() {
      return Shape::kWarps * FireSlot::kSlots * static_cast<int>(sizeof(float2));
    }

    __device__ __forceinline__ KeyRows(const FireScore& policy, const SoftmaxProblem&, int first,
                                       int warp_row)
        : policy_(policy), head_(policy.tables), first_(first), warp_row_(warp_row) {}

    __device__ __forceinline__ void load(void* stage, int begin) {
      Stage& to = *static_cast<Stage*>(stage);
      copy_chunks<sizeof(to.queries) / 16, Shape::kThreads>(to.queries,
                                                            policy_.tables.queries_T + begin);
      copy_chunks<sizeof(to.distances) / 16, Shape::kThreads>(
          to.distances, policy_.tables.distances + kFireMargin + begin - first_ - Shape::kKeys);
    }
    __device__ __forceinline__ void enter(const void* stage, int) {
      const Stage& tile = *static_cast<const Stage*>(stage);
      const FireQuery one = tile.queries[0];
      float low_r = one.r, high_r = one.r;
      bool same = true;
#pragma unroll
      for (int i = 0; i < Shape::kQueries; i += 32) {
        const FireQuery x =
            tile.queries[min(i + static_cast<int>(threadIdx.x) % 32, Shape::kQueries - 1)];
        low_r = fminf(low_r, x.r);
        high_r = fmaxf(high_r, x.r);
        same = same && x.r == one.r && x.by_c == one.by_c && x.by_m == one.by_m;
      }
      flat_ = __all_sync(~0u, same);
      // The last key and the first query; the first key and the last query.
      const FireDistance* const first_key = tile.distances + Shape::kKeys - warp_row_;
      breaks_ = head_.breaks(first_key[1 - kWarpKeys].psi * lowest_of_warp(low_r),
                             first_key[Shape::kQueries - 1].psi * highest_of_warp(high_r));
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

    __device__ __forceinline__ void begin_gradient(void* shared) {
      slots_ = static_cast<float2*>(shared);
      for (int i = threadIdx.x % 32; i < FireSlot::kSlots; i += 32) {
        mine()[i] = make_float2(0.0f, 0.0f);
      }
      __syncwarp();
    }

    // Masked pairs and queries behind the pack have dz = 0.
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
    __device__ __forceinline__ void end_gradient() {
      flush(segment_);
      add_to_slot(FireSlot::parameters(), dc_ / kLog2e, dm_ / kLog2e);
      __syncthreads();
      float* const to =
          policy_.partials +
          (static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x) * int64_t{kFireSums};
      const float* const sums = reinterpret_cast<const float*>(slots_);
      for (int i = threadIdx.x; i < kFireSums; i += Shape::kThreads) {
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
    __device__ __forceinline__ float2* mine() const {
      return slots_ + threadIdx.x / 32 * FireSlot::kSlots;
    }
    // Even lanes add up x, odd ones y; lanes 0 and 1 alone touch what the warp sums up.
    __device__ __forceinline__ void add_to_slot(int slot, float x, float y) {
      const int lane = static_cast<int>(threadIdx.x) % 32;
      const bool odd = lane % 2 != 0;
      const float theirs = __shfl_xor_sync(~0u, odd ? x : y, 1);
      float sum = (odd ? y : x) + theirs;
#pragma unroll
      for (int offset = 16; offset > 1; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
      if (lane < 2) reinterpret_cast<float*>(mine() + slot)[lane] += sum;
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
    int first_, warp_row_;
    // Of the tile.
    bool flat_ = false;  // all queries are the same to FIRE
    FireHead::Breaks breaks_{0, 0};
    const FireDistance* lane_ = nullptr;
    const FireQuery* queries_ = nullptr;
    // Of the gradient: the lane's sums of tiles that follow each other in one segment.
    float2* slots_ = nullptr;
    int segment_ = 0;
    float dz_ = 0.0f, dz_u_ = 0.0f, dc_ = 0.0f, dm_ = 0.0f;
  };
};

// ---- FIRE's tables ------------------------------------------------------------------------------

__device__ FireNetwork load_network(const FireParameters& x) {
  FireNetwork net;
  for (int k = 0; k < kFireUnits; ++k) {
    net.w1[k] = __bfloat162float(x.w1[k]);
    net.b1[k] = __bfloat162float(x.b1[k]);
  }
  return net;
}

__global__ void fire_positions_kernel(SoftmaxProblem p, FireParameters x, FireTables to) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const float c = __bfloat162float(*x.c), m = __bfloat162float(*x.m);
  if (i < p.max_seqlen + 2 * kFireMargin) to.distances[i] = fire_distance(c, i - kFireMargin);
  if (i >= p.tokens + kFireMargin) return;
  const FireQuery query =
      i < p.tokens ? fire_query(c, m, p.positions[i]) : FireQuery{0.0f, 0.0f, 0.0f, 0.0f};
  to.r_T[i] = query.r;
  if (to.queries_T != nullptr) to.queries_T[i] = query;
}

// A block for each head, of two warps.
__global__ void fire_network_kernel(FireParameters x, FireTables to) {
  __shared__ FireNetwork net;
  __shared__ float w2[kFireUnits];
  __shared__ int ranks[kFireUnits];
  const int head = static_cast<int>(blockIdx.x), i = static_cast<int>(threadIdx.x);
  if (i == 0) net = load_network(x);
  if (i < kFireUnits) w2[i] = __bfloat162float(x.w2[head * kFireUnits + i]);
  __syncthreads();
  if (i < kFireUnits) {
    ranks[i] = fire_rank(net, i);
    to.bends_HK[head * kFireUnits + ranks[i]] = kLog2e * fire_bend(net.w1[i], w2[i]);
    if (head == 0) to.breaks_K[ranks[i]] = fire_break(net.w1[i], net.b1[i]);
  }
  __syncthreads();
  if (i > kFireUnits) return;
  const FireLine line = fire_line(net, w2, __bfloat162float(x.b2[head]), ranks, i);
  to.lines_HS[head * (kFireUnits + 1) + i] = make_float2(
      kLog2e * static_cast<float>(line.slope), kLog2e * static_cast<float>(line.intercept));
}

// ---- FIRE's gradients ---------------------------------------------------------------------------

constexpr int kSumParts = 4;

// Adds up the blocks of one head, in order: what its units, c and m get from it. dw2 is complete.
__global__ __launch_bounds__(kFireSums* kSumParts) void fire_heads_kernel(
    FireParameters x, FireGradients dx, const float* partials, int blocks, double* units_HK2,
    double* heads_H2) {
  __shared__ double parts[kSumParts][kFireSums];
  __shared__ FireNetwork net;
  const int head = static_cast<int>(blockIdx.x);
  const int i = static_cast<int>(threadIdx.x), part = static_cast<int>(threadIdx.y);
  const float* const mine = partials + static_cast<int64_t>(head) * blocks * kFireSums;
  double sum = 0.0;
  for (int block = part; block < blocks; block += kSumParts) {
    sum += static_cast<double>(mine[static_cast<int64_t>(block) * kFireSums + i]);
  }
  parts[part][i] = sum;
  if (i == 0 && part == 0) net = load_network(x);
  __syncthreads();
  if (part == 0) {
    for (int other = 1; other < kSumParts; ++other) parts[0][i] += parts[other][i];
  }
  __syncthreads();
  if (part != 0 || i >= kFireUnits) return;
  const float w1 = net.w1[i], b1 = net.b1[i];
  const FireUnitSums unit = fire_unit_sums(parts[0], w1, b1, fire_rank(net, i));
  const int at = head * kFireUnits + i;
  units_HK2[2 * at] = unit.dz;
  units_HK2[2 * at + 1] = unit.dz_u;
  dx.w2[at] +=
      static_cast<float>(static_cast<double>(w1) * unit.dz_u + static_cast<double>(b1) * unit.dz);
  if (i < 2) heads_H2[2 * head + i] = parts[0][2 * FireSlot::parameters() + i];
}

// One warp: adds up the heads, in order.
__global__ void fire_parameters_kernel(FireParameters x, FireGradients dx, int heads,
                                       const double* units_HK2, const double* heads_H2) {
  const int i = static_cast<int>(threadIdx.x);
  double dw1 = 0.0, db1 = 0.0, parameter = 0.0;
  for (int head = 0; head < heads; ++head) {
    const int at = head * kFireUnits + i;
    const auto w2 = static_cast<double>(__bfloat162float(x.w2[at]));
    db1 += w2 * units_HK2[2 * at];
    dw1 += w2 * units_HK2[2 * at + 1];
    if (i < 2) parameter += heads_H2[2 * head + i];
  }
  dx.w1[i] += static_cast<float>(dw1);
  dx.b1[i] += static_cast<float>(db1);
  if (i == 0) *dx.c += static_cast<float>(parameter);
  if (i == 1) *dx.m += static_cast<float>(parameter);
}

// ---- Launches -----------------------------------------------------------------------------------

AlibiScore alibi_score(const SoftmaxProblem& p, const AlibiSlopes& slopes) {
  AlibiScore score{p.scale * kLog2e, slopes};
  for (float& slope : score.slopes_log2.of_head) slope *= kLog2e;
  return score;
}

// Where the scratch has what; the tables are made.
cudaError_t prepare(cudaStream_t stream, const SoftmaxProblem& p, const FireParameters& x,
                    const FireScratch& s, bool backward, void* scratch, FireScore& score) {
  auto* const data = static_cast<char*>(scratch);
  const FireTables tables{
      .distances = reinterpret_cast<FireDistance*>(data + s.distances),
      .r_T = reinterpret_cast<float*>(data + s.r),
      .queries_T = backward ? reinterpret_cast<FireQuery*>(data + s.queries) : nullptr,
      .breaks_K = reinterpret_cast<float*>(data + s.breaks),
      .lines_HS = reinterpret_cast<float2*>(data + s.lines),
      .bends_HK = reinterpret_cast<float*>(data + s.bends)};
  score = {p.scale * kLog2e, tables, reinterpret_cast<float*>(data + s.partials)};
  constexpr int kPositions = 128;
  const int64_t work = std::max(p.max_seqlen, p.tokens) + 2 * kFireMargin;
  fire_positions_kernel<<<blocks(work, kPositions), kPositions, 0, stream>>>(p, x, tables);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  fire_network_kernel<<<p.heads, 2 * kFireUnits, 0, stream>>>(x, tables);
  return cudaGetLastError();
}

static_assert(KeyGradientShape<32>::kKeys == kFireBlockKeys &&
              KeyGradientShape<64>::kKeys == kFireBlockKeys &&
              KeyGradientShape<128>::kKeys == kFireBlockKeys);
static_assert(sizeof(FireDistance) == sizeof(float2));

}  // namespace

cudaError_t alibi_forward(cudaStream_t stream, const SoftmaxProblem& p, const AlibiSlopes& slopes) {
  if (p.heads > kMaxAlibiHeads) return cudaErrorInvalidValue;
  return forward(stream, p, alibi_score(p, slopes));
}

cudaError_t alibi_backward(cudaStream_t stream, const SoftmaxProblem& p, const AlibiSlopes& slopes,
                           void* scratch) {
  if (p.heads > kMaxAlibiHeads) return cudaErrorInvalidValue;
  return backward(stream, p, alibi_score(p, slopes), static_cast<float*>(scratch));
}

cudaError_t fire_forward(cudaStream_t stream, const SoftmaxProblem& p, const FireParameters& x,
                         void* scratch) {
  if (p.tokens == 0) return cudaSuccess;
  const FireScratch s = fire_scratch(p.tokens, p.heads, p.max_seqlen, false);
  FireScore score{};
  const cudaError_t error = prepare(stream, p, x, s, false, scratch, score);
  return error == cudaSuccess ? forward(stream, p, score) : error;
}

cudaError_t fire_backward(cudaStream_t stream, const SoftmaxProblem& p, const FireParameters& x,
                          const FireGradients& dx, void* scratch) {
  if (p.tokens == 0) return cudaSuccess;
  const FireScratch s = fire_scratch(p.tokens, p.heads, p.max_seqlen, true);
  FireScore score{};
  cudaError_t error = prepare(stream, p, x, s, true, scratch, score);
  if (error != cudaSuccess) return error;
  auto* const data = static_cast<char*>(scratch);
  error = backward(stream, p, score, reinterpret_cast<float*>(data + s.delta));
  if (error != cudaSuccess) return error;
  auto* const units = reinterpret_cast<double*>(data + s.units);
  auto* const heads = reinterpret_cast<double*>(data + s.heads);
  const auto key_blocks = static_cast<int>(grid_of(p, kFireBlockKeys).x);
  fire_heads_kernel<<<p.heads, dim3(kFireSums, kSumParts), 0, stream>>>(x, dx, score.partials,
                                                                        key_blocks, units, heads);
  error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  fire_parameters_kernel<<<1, kFireUnits, 0, stream>>>(x, dx, p.heads, units, heads);
  return cudaGetLastError();
}

}  // namespace sbtrain::kernels
