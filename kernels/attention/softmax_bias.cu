#include <algorithm>

#include "kernels/attention/fire.h"
#include "kernels/attention/softmax.cuh"
#include "kernels/attention/softmax_bias.h"
#include "kernels/reduce.cuh"

namespace sbtrain::kernels {
namespace {

// Where the lane's first element lies in a tile, as in tile_products.cuh.
__device__ __forceinline__ int lane_row() {
  return static_cast<int>(threadIdx.x) % 32 / 4;
}
__device__ __forceinline__ int lane_col() {
  return static_cast<int>(threadIdx.x) % 4 * 2;
}

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

  template <int kRowBlocks>
  struct QueryRows {
    __device__ __forceinline__ QueryRows(const AlibiScore& policy, const SoftmaxProblem&, int first)
        : scale(policy.scale_log2), slope(policy.slopes_log2.of_head[blockIdx.y]), first(first) {}
    template <int kColBlocks>
    __device__ __forceinline__ void score(Accumulator<kRowBlocks, kColBlocks>& s, int begin) {
      AlibiScore::score<1>(s, scale, slope, first + lane_row() - begin - lane_col());
    }
    float scale, slope;
    int first;
  };
  template <int kRowBlocks>
  struct KeyRows {
    static constexpr int shared_bytes() { return 0; }
    __device__ __forceinline__ KeyRows(const AlibiScore& policy, const SoftmaxProblem&, int first)
        : scale(policy.scale_log2), slope(policy.slopes_log2.of_head[blockIdx.y]), first(first) {}
    template <int kColBlocks>
    __device__ __forceinline__ void score(Accumulator<kRowBlocks, kColBlocks>& s, int begin) {
      AlibiScore::score<-1>(s, scale, slope, begin + lane_col() - first - lane_row());
    }
    __device__ __forceinline__ void begin_gradient(void*) {}
    template <int kColBlocks>
    __device__ __forceinline__ void add_gradient(Accumulator<kRowBlocks, kColBlocks>&, int) {}
    __device__ __forceinline__ void end_gradient() {}
    float scale, slope;
    int first;
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

// The network of one head as a warp sees it: lane k holds break k.
class FireHead {
 public:
  __device__ __forceinline__ explicit FireHead(const FireTables& tables)
      : distances_(tables.distances + kFireMargin),
        lines_(tables.lines_HS + blockIdx.y * (kFireUnits + 1)),
        bends_(tables.bends_HK + blockIdx.y * kFireUnits),
        break_(tables.breaks_K[threadIdx.x % 32]) {}

  // How many breaks are below every u of a tile, and below its highest.
  struct Breaks {
    int low, high;
  };
  __device__ __forceinline__ Breaks breaks(int low_distance, int high_distance, float low_r,
                                           float high_r) const {
    const float low = psi(low_distance) * low_r;
    const float high = psi(high_distance) * high_r;
    return {__popc(__ballot_sync(~0u, break_ < low)), __popc(__ballot_sync(~0u, break_ < high))};
  }
  __device__ __forceinline__ float psi(int distance) const {
    return __ldg(&distances_[distance].psi);
  }
  __device__ __forceinline__ FireDistance distance(int distance) const {
    const float2 x = __ldg(reinterpret_cast<const float2*>(distances_ + distance));
    return {x.x, x.y};
  }
  __device__ __forceinline__ float2 line(int segment) const { return __ldg(lines_ + segment); }
  __device__ __forceinline__ float bend(int rank) const { return __ldg(bends_ + rank); }
  __device__ __forceinline__ float at(int rank) const { return __shfl_sync(~0u, break_, rank); }

 private:
  const FireDistance* distances_;
  const float2* lines_;
  const float* bends_;
  float break_;
};

struct FireScore {
  static constexpr bool kExactDelta = true;  // errors of a row would all go into few sums
  float scale_log2;
  FireTables tables;
  float* partials;  // [H, blocks, kFireSums]

  template <int kRowBlocks>
  class QueryRows {
    static constexpr int kRows = 2 * kRowBlocks;
    static constexpr int kQueries = 16 * kRowBlocks;

   public:
    __device__ __forceinline__ QueryRows(const FireScore& policy, const SoftmaxProblem&, int first)
        : head_(policy.tables), scale_(policy.scale_log2), first_(first) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) r_[i] = policy.tables.r_T[first + lane_row() + i * 8];
      const float r = policy.tables.r_T[first + threadIdx.x % kQueries];
      low_r_ = lowest_of_warp(r);
      high_r_ = highest_of_warp(r);
    }

    template <int kColBlocks>
    __device__ __forceinline__ void score(Accumulator<kRowBlocks, kColBlocks>& s, int begin) {
      const FireHead::Breaks breaks = head_.breaks(first_ - (begin + kColBlocks * 8 - 1),
                                                   first_ + kQueries - 1 - begin, low_r_, high_r_);
      const float2 line = head_.line(breaks.low);
      const int distance = first_ + lane_row() - begin - lane_col();
      const auto r = [&](int i, int, int) { return r_[i]; };
      const auto psi = [&](int offset) { return head_.psi(distance + offset); };
      fire_score<1, kRows, kColBlocks>(s, scale_, line.x, line.y, r, psi);
#pragma unroll 1
      for (int k = breaks.low; k < breaks.high; ++k) {
        fire_bend_score<1, kRows, kColBlocks>(s, head_.at(k), head_.bend(k), r, psi);
      }
    }

   private:
    FireHead head_;
    float scale_;
    int first_;
    float r_[kRows], low_r_, high_r_;
  };

  template <int kRowBlocks>
  class KeyRows {
    static constexpr int kRows = 2 * kRowBlocks;

   public:
    static constexpr int shared_bytes() {
      return kWarps * FireSlot::kSlots * static_cast<int>(sizeof(float2));
    }
    __device__ __forceinline__ KeyRows(const FireScore& policy, const SoftmaxProblem&, int first)
        : policy_(policy), head_(policy.tables), first_(first) {}

    template <int kColBlocks>
    __device__ __forceinline__ void score(Accumulator<kRowBlocks, kColBlocks>& s, int begin) {
      constexpr int kQueries = 8 * kColBlocks;
      const float* const r_T = policy_.tables.r_T + begin;
      const float one = __ldg(r_T + threadIdx.x % 32 % kQueries);
      breaks_ = head_.breaks(begin - (first_ + 16 * kRowBlocks - 1), begin + kQueries - 1 - first_,
                             lowest_of_warp(one), highest_of_warp(one));
      float r_of[kColBlocks][2];
#pragma unroll
      for (int c = 0; c < kColBlocks; ++c) {
        const float2 pair = __ldg(reinterpret_cast<const float2*>(r_T + c * 8 + lane_col()));
        r_of[c][0] = pair.x;
        r_of[c][1] = pair.y;
      }
      const float2 line = head_.line(breaks_.low);
      const int distance = lane_distance(begin);
      const auto r = [&](int, int c, int odd) { return r_of[c][odd]; };
      const auto psi = [&](int offset) { return head_.psi(distance + offset); };
      fire_score<-1, kRows, kColBlocks>(s, policy_.scale_log2, line.x, line.y, r, psi);
#pragma unroll 1
      for (int k = breaks_.low; k < breaks_.high; ++k) {
        fire_bend_score<-1, kRows, kColBlocks>(s, head_.at(k), head_.bend(k), r, psi);
      }
    }

    __device__ __forceinline__ void begin_gradient(void* shared) {
      slots_ = static_cast<float2*>(shared);
      for (int i = threadIdx.x % 32; i < FireSlot::kSlots; i += 32) {
        mine()[i] = make_float2(0.0f, 0.0f);
      }
      __syncwarp();
    }

    // After score() of the same tile. Masked pairs and queries behind the pack have dz = 0.
    template <int kColBlocks>
    __device__ __forceinline__ void add_gradient(Accumulator<kRowBlocks, kColBlocks>& dz,
                                                 int begin) {
      if (breaks_.low != segment_) flush(breaks_.low);
      const int distance = lane_distance(begin);
      const auto of_distance = [&](int offset) { return head_.distance(distance + offset); };
      const auto* const queries =
          reinterpret_cast<const float4*>(policy_.tables.queries_T + begin + lane_col());
      const auto query = [&](int c, int odd) {
        const float4 x = __ldg(queries + c * 8 + odd);
        return FireQuery{x.x, x.y, x.z, x.w};
      };
      const FireTileSums all =
          fire_tile_sums<true, kRows, kColBlocks>(dz, 0.0f, query, of_distance);
      dz_ += all.dz;
      dz_u_ += all.dz_u;
      add_slope(all, head_.line(segment_).x);
#pragma unroll 1
      for (int k = breaks_.low; k < breaks_.high; ++k) {
        const FireTileSums behind =
            fire_tile_sums<false, kRows, kColBlocks>(dz, head_.at(k), query, of_distance);
        add_slope(behind, head_.bend(k));
        add_to_slot(FireSlot::behind(k), behind.dz, behind.dz_u);
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
      for (int i = threadIdx.x; i < kFireSums; i += kThreads) {
        float sum = 0.0f;
        for (int warp = 0; warp < kWarps; ++warp) sum += sums[warp * kFireSums + i];
        to[i] = sum;
      }
    }

   private:
    __device__ __forceinline__ int lane_distance(int begin) const {
      return begin + lane_col() - first_ - lane_row();
    }
    __device__ __forceinline__ float2* mine() const {
      return slots_ + threadIdx.x / 32 * FireSlot::kSlots;
    }
    // Lane 0 alone touches what the warp sums up.
    __device__ __forceinline__ void add_to_slot(int slot, float x, float y) {
      x = lanes_sum<32>(x);
      y = lanes_sum<32>(y);
      if (threadIdx.x % 32 != 0) return;
      float2& to = mine()[slot];
      to = make_float2(to.x + x, to.y + y);
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
    int first_;
    FireHead::Breaks breaks_{0, 0};
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

static_assert(fire_block_keys(32) == KeyGradientShape<32>::kKeys &&
              fire_block_keys(64) == KeyGradientShape<64>::kKeys &&
              fire_block_keys(128) == KeyGradientShape<128>::kKeys);
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
  const FireScratch s = fire_scratch(p.tokens, p.heads, p.head_dim, p.max_seqlen, false);
  FireScore score{};
  const cudaError_t error = prepare(stream, p, x, s, false, scratch, score);
  return error == cudaSuccess ? forward(stream, p, score) : error;
}

cudaError_t fire_backward(cudaStream_t stream, const SoftmaxProblem& p, const FireParameters& x,
                          const FireGradients& dx, void* scratch) {
  if (p.tokens == 0) return cudaSuccess;
  const FireScratch s = fire_scratch(p.tokens, p.heads, p.head_dim, p.max_seqlen, true);
  FireScore score{};
  cudaError_t error = prepare(stream, p, x, s, true, scratch, score);
  if (error != cudaSuccess) return error;
  auto* const data = static_cast<char*>(scratch);
  error = backward(stream, p, score, reinterpret_cast<float*>(data + s.delta));
  if (error != cudaSuccess) return error;
  auto* const units = reinterpret_cast<double*>(data + s.units);
  auto* const heads = reinterpret_cast<double*>(data + s.heads);
  const auto key_blocks = static_cast<int>(ceil_div(p.tokens, fire_block_keys(p.head_dim)));
  fire_heads_kernel<<<p.heads, dim3(kFireSums, kSumParts), 0, stream>>>(x, dx, score.partials,
                                                                        key_blocks, units, heads);
  error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  fire_parameters_kernel<<<1, kFireUnits, 0, stream>>>(x, dx, p.heads, units, heads);
  return cudaGetLastError();
}

}  // namespace sbtrain::kernels
