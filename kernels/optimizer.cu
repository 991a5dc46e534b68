#include "kernels/elementwise.cuh"
#include "kernels/optimizer.h"
#include "kernels/reduce.cuh"

namespace sbtrain::kernels {
namespace {

constexpr int kOptimizerThreads = 256;
constexpr int kOptimizerWidth = 4;

// ---- Reductions -------------------------------------------------------------------------------

// What block blockIdx.x sums.
template <bool kSquare, int kWidth>
__device__ double part_sum(const Matrix<const float>& x, int64_t packs, int64_t packs_per_row) {
  double sum[1] = {};
#pragma unroll 4
  for (int64_t pack = int64_t{blockIdx.x} * kOptimizerThreads + threadIdx.x; pack < packs;
       pack += kSumParts * kOptimizerThreads) {
    const Position at = pack_position<kWidth>(pack, packs_per_row);
    const auto values = load_pack<kWidth>(x.row(at.row) + at.col);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const double v = values[i];
      sum[0] += kSquare ? v * v : v;
    }
  }
  group_sum<kOptimizerThreads>(sum);
  return sum[0];
}

// The parts of a sum over packs that are not zero: those of the first blocks.
inline __host__ __device__ int64_t parts_of(int64_t packs) {
  const int64_t blocks = (packs + kOptimizerThreads - 1) / kOptimizerThreads;
  return blocks < kSumParts ? blocks : kSumParts;
}

// A single part is the sum.
template <bool kSquare, int kWidth>
__global__ void __launch_bounds__(kOptimizerThreads)
    sum_parts_kernel(const Reduction p, int64_t packs, int64_t packs_per_row) {
  const double sum = part_sum<kSquare, kWidth>(p.x, packs, packs_per_row);
  if (threadIdx.x > 0) return;
  if (gridDim.x == 1) {
    *p.out += sum;
  } else {
    p.scratch[blockIdx.x] = sum;
  }
}

__global__ void __launch_bounds__(kOptimizerThreads)
    square_parts_kernel(const __grid_constant__ SquaredNorms p) {
  const int64_t packs = p.n[blockIdx.y] / kOptimizerWidth;
  if (blockIdx.x >= parts_of(packs)) return;
  const double sum = part_sum<true, kOptimizerWidth>({p.x[blockIdx.y], 0}, packs, packs);
  if (threadIdx.x == 0) p.scratch[blockIdx.y * kSumParts + blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kOptimizerThreads)
    finish_sum_kernel(double* out, const double* parts, int64_t count) {
  double sum[1] = {};
  for (int64_t i = threadIdx.x; i < count; i += kOptimizerThreads) sum[0] += parts[i];
  group_sum<kOptimizerThreads>(sum);
  if (threadIdx.x == 0) *out += sum[0];
}

// The same for each array in turn.
template <int kMaxCount>
__global__ void __launch_bounds__(kOptimizerThreads)
    finish_squares_kernel(const __grid_constant__ SquaredNorms p) {
  int64_t count[kMaxCount];
  int64_t most = 0;
#pragma unroll
  for (int n = 0; n < kMaxCount; ++n) {
    count[n] = n < p.count ? parts_of(p.n[n] / kOptimizerWidth) : 0;
    most = max(most, count[n]);
  }
  double sums[kMaxCount] = {};
  for (int64_t i = threadIdx.x; i < most; i += kOptimizerThreads) {
    double parts[kMaxCount];  // all are read before the first is added
#pragma unroll
    for (int n = 0; n < kMaxCount; ++n) {
      parts[n] = i < count[n] ? p.scratch[n * kSumParts + i] : 0.0;
    }
#pragma unroll
    for (int n = 0; n < kMaxCount; ++n) sums[n] += parts[n];
  }
  group_sum<kOptimizerThreads>(sums);
  if (threadIdx.x > 0) return;
  double total = *p.out;
#pragma unroll
  for (int n = 0; n < kMaxCount; ++n) {
    if (n < p.count) total += sums[n];
  }
  *p.out = total;
}

template <bool kSquare>
void reduce(cudaStream_t stream, const char* name, const Reduction& p) {
  if (p.rows == 0 || p.cols == 0) return;
  const bool flat = p.x.stride == p.cols;
  const int64_t cols = flat ? p.rows * p.cols : p.cols;
  const bool vectors =
      cols % kOptimizerWidth == 0 &&
      vectors_fit<kOptimizerWidth>(Matrix<const float>{p.x.data, flat ? 0 : p.x.stride});
  with_width<kOptimizerWidth>(vectors, [&](auto width) {
    constexpr int kPackWidth = decltype(width)::value;
    const int64_t packs = p.rows * p.cols / kPackWidth;
    const int64_t parts = parts_of(packs);
    sum_parts_kernel<kSquare, kPackWidth>
        <<<static_cast<unsigned>(parts), kOptimizerThreads, 0, stream>>>(p, packs,
                                                                         cols / kPackWidth);
    check_launch(name);
    if (parts == 1) return;
    finish_sum_kernel<<<1, kOptimizerThreads, 0, stream>>>(p.out, p.scratch, parts);
    check_launch(name);
  });
}

__global__ void finish_step_kernel(const FinishStep p) {
  double* stats = p.stats;
  const double targets = fmax(stats[kValidTargets], 1.0);
  const double loss = stats[kLossSum] / targets;
  const bool finite = isfinite(loss) && isfinite(stats[kSquaredNorm]);
  const bool warm = p.spike_sigma > 0.0 && stats[kLossCount] >= p.spike_window;
  const double bound = stats[kLossMean] + p.spike_sigma * sqrt(stats[kLossVariance]);
  const bool spike = finite && warm && loss > bound;
  const bool apply = finite && !spike;
  if (apply) stats[kUpdates] += 1.0;
  if (apply && stats[kValidTargets] > 0.0) {
    stats[kLossCount] += 1.0;
    const double share = 1.0 / fmin(stats[kLossCount], p.spike_window);
    const double distance = loss - stats[kLossMean];
    stats[kLossMean] += share * distance;
    stats[kLossVariance] = (1.0 - share) * (stats[kLossVariance] + share * distance * distance);
  }
  const double norm = sqrt(stats[kSquaredNorm]) / targets;
  stats[kGradScale] = (p.clip > 0.0 && norm > p.clip ? p.clip / norm : 1.0) / targets;
  stats[kBias1] = 1.0 - pow(p.beta1, stats[kUpdates]);
  stats[kBias2] = 1.0 - pow(p.beta2, stats[kUpdates]);
  stats[kApply] = apply ? 1.0 : 0.0;
  stats[kSpike] = spike ? 1.0 : 0.0;
}

// ---- AdamW ------------------------------------------------------------------------------------

// The decay of a part's elements, which must be asked for in rising order.
class Decay {
 public:
  __device__ Decay(const AdamW& p, const AdamWPart& part, int64_t first)
      : p_(p), index_(part.first_segment), end_(part.end_segment) {
    int end = end_;
    while (index_ < end) {  // the first segment that ends after `first`
      const int middle = (index_ + end) / 2;
      if (p.segments[middle].end <= first) {
        index_ = middle + 1;
      } else {
        end = middle;
      }
    }
    load();
  }
  __device__ float at(int64_t i) {
    while (i >= segment_.end) {
      ++index_;
      load();
    }
    return i >= segment_.begin ? segment_.decay : 0.0f;
  }

 private:
  __device__ void load() {
    segment_ = index_ < end_ ? p_.segments[index_] : DecaySegment{INT64_MAX, INT64_MAX, 0.0f};
  }
  const AdamW& p_;
  int index_;
  const int end_;
  DecaySegment segment_;
};

// The elements of each part that a launch updates, and the first of the blocks that do.
struct AdamWRanges {
  int64_t begin[kMaxAdamWParts], end[kMaxAdamWParts];
  unsigned first_block[kMaxAdamWParts];
};

// The number of elements of a range is a multiple of kWidth.
template <int kWidth>
__global__ void __launch_bounds__(kOptimizerThreads)
    adamw_kernel(const __grid_constant__ AdamW p, const __grid_constant__ AdamWRanges ranges) {
  int n = 0;
  while (n + 1 < p.part_count && blockIdx.x >= ranges.first_block[n + 1]) ++n;
  const AdamWPart& part = p.parts[n];
  const int64_t block = blockIdx.x - ranges.first_block[n];
  const int64_t first = ranges.begin[n] + (block * kOptimizerThreads + threadIdx.x) * kWidth;
  if (first >= ranges.end[n]) return;
  if (p.stats[kApply] == 0.0) return;
  auto w = load_pack<kWidth>(part.w + first);
  auto m = load_pack<kWidth>(part.m + first);
  auto v = load_pack<kWidth>(part.v + first);
  const auto grad = load_pack<kWidth>(part.grad + first);
  const auto grad_scale = static_cast<float>(p.stats[kGradScale]);
  const auto m_correction = static_cast<float>(1.0 / p.stats[kBias1]);
  const auto v_correction = static_cast<float>(1.0 / p.stats[kBias2]);
  Decay decay(p, part, first);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const float g = grad_scale * grad[i];
    m[i] = p.beta1 * m[i] + (1.0f - p.beta1) * g;
    v[i] = p.beta2 * v[i] + (1.0f - p.beta2) * (g * g);
    const float step = m[i] * m_correction / (sqrtf(v[i] * v_correction) + p.eps);
    w[i] -= p.lr * (step + decay.at(first + i) * w[i]);
  }
  store_pack(part.w + first, w);
  store_pack(part.m + first, m);
  store_pack(part.v + first, v);
  if (part.w_bf16 != nullptr) store_floats(part.w_bf16 + first, w);
}

// Updates elements [begin(n), end(n)) of each part n.
template <int kWidth, typename Begin, typename End>
void launch_adamw(cudaStream_t stream, const AdamW& p, const Begin& begin, const End& end) {
  AdamWRanges ranges{};
  unsigned count = 0;
  for (int n = 0; n < p.part_count; ++n) {
    ranges.begin[n] = begin(n);
    ranges.end[n] = end(n);
    ranges.first_block[n] = count;
    if (end(n) > begin(n)) count += blocks(end(n) - begin(n), kOptimizerThreads * kWidth);
  }
  if (count == 0) return;
  adamw_kernel<kWidth><<<count, kOptimizerThreads, 0, stream>>>(p, ranges);
  check_launch("adamw");
}

}  // namespace

void launch(cudaStream_t stream, const Sum& p) {
  reduce<false>(stream, "sum", p);
}

void launch(cudaStream_t stream, const SquaredNorm& p) {
  reduce<true>(stream, "squared_norm", p);
}

void launch(cudaStream_t stream, const SquaredNorms& p) {
  if (p.count > kMaxNormParts) {
    throw_invalid_argument("squared_norms: %d arrays, at most %d", static_cast<int>(p.count),
                           static_cast<int>(kMaxNormParts));
  }
  if (p.count == 0) return;
  int64_t longest = 0;
  for (int i = 0; i < p.count; ++i) longest = std::max(longest, p.n[i]);
  const int64_t parts = parts_of(longest / kOptimizerWidth);
  if (parts > 0) {
    const dim3 grid(static_cast<unsigned>(parts), static_cast<unsigned>(p.count));
    square_parts_kernel<<<grid, kOptimizerThreads, 0, stream>>>(p);
    check_launch("squared_norms");
  }
  constexpr int kFew = kMaxNormParts / 2;
  const auto finish =
      p.count <= kFew ? finish_squares_kernel<kFew> : finish_squares_kernel<kMaxNormParts>;
  finish<<<1, kOptimizerThreads, 0, stream>>>(p);
  check_launch("squared_norms");
}

void launch(cudaStream_t stream, const FinishStep& p) {
  finish_step_kernel<<<1, 1, 0, stream>>>(p);
  check_launch("finish_step");
}

void launch(cudaStream_t stream, const AdamW& p) {
  if (p.part_count > kMaxAdamWParts) {
    throw_invalid_argument("adamw: %d parts, at most %d", static_cast<int>(p.part_count),
                           static_cast<int>(kMaxAdamWParts));
  }
  bool vectors = true;
  for (int n = 0; n < p.part_count; ++n) {
    const AdamWPart& part = p.parts[n];
    vectors =
        vectors && vectors_fit<kOptimizerWidth>(part.w, part.m, part.v, part.grad, part.w_bf16);
  }
  const auto zero = [](int) { return int64_t{0}; };
  const auto whole = [&](int n) {
    return vectors ? p.parts[n].n / kOptimizerWidth * kOptimizerWidth : 0;
  };
  launch_adamw<kOptimizerWidth>(stream, p, zero, whole);
  launch_adamw<1>(stream, p, whole, [&](int n) { return p.parts[n].n; });
}

}  // namespace sbtrain::kernels
