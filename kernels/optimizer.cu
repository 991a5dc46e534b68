#include "kernels/elementwise.cuh"
#include "kernels/optimizer.h"
#include "kernels/reduce.cuh"
#include "kernels/scratch_sizes.h"

namespace sbtrain::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWidth = 4;

// ---- Reductions -------------------------------------------------------------------------------

template <bool kSquare, int kWidth>
__global__ void __launch_bounds__(kThreads)
    sum_parts_kernel(const Reduction p, int64_t packs, int64_t packs_per_row) {
  double sum[1] = {};
#pragma unroll 4
  for (int64_t pack = int64_t{blockIdx.x} * kThreads + threadIdx.x; pack < packs;
       pack += kSumParts * kThreads) {
    const Position at = pack_position<kWidth>(pack, packs_per_row);
    const auto x = load_pack<kWidth>(p.x.row(at.row) + at.col);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const double v = x[i];
      sum[0] += kSquare ? v * v : v;
    }
  }
  group_sum<kThreads>(sum);
  if (threadIdx.x == 0) p.scratch[blockIdx.x] = sum[0];
}

__global__ void __launch_bounds__(kThreads) finish_sum_kernel(double* out, const double* parts) {
  double sum[1] = {};
  for (int64_t i = threadIdx.x; i < kSumParts; i += kThreads) sum[0] += parts[i];
  group_sum<kThreads>(sum);
  if (threadIdx.x == 0) *out += sum[0];
}

template <bool kSquare>
void reduce(cudaStream_t stream, const char* name, const Reduction& p) {
  if (p.rows == 0 || p.cols == 0) return;
  const bool flat = p.x.stride == p.cols;
  const int64_t cols = flat ? p.rows * p.cols : p.cols;
  const bool vectors = cols % kWidth == 0 &&
                       vectors_fit<kWidth>(Matrix<const float>{p.x.data, flat ? 0 : p.x.stride});
  with_width<kWidth>(vectors, [&](auto width) {
    constexpr int kPackWidth = decltype(width)::value;
    const int64_t packs = p.rows * p.cols / kPackWidth;
    sum_parts_kernel<kSquare, kPackWidth>
        <<<kSumParts, kThreads, 0, stream>>>(p, packs, cols / kPackWidth);
  });
  check_launch(name);
  finish_sum_kernel<<<1, kThreads, 0, stream>>>(p.out, p.scratch);
  check_launch(name);
}

__global__ void finish_step_kernel(const FinishStep p) {
  double* stats = p.stats;
  const bool apply = isfinite(stats[kLossSum]) && isfinite(stats[kSquaredNorm]);
  if (apply) stats[kUpdates] += 1.0;
  const double targets = fmax(stats[kValidTargets], 1.0);
  const double norm = sqrt(stats[kSquaredNorm]) / targets;
  stats[kGradScale] = (p.clip > 0.0 && norm > p.clip ? p.clip / norm : 1.0) / targets;
  stats[kBias1] = 1.0 - pow(p.beta1, stats[kUpdates]);
  stats[kBias2] = 1.0 - pow(p.beta2, stats[kUpdates]);
  stats[kApply] = apply ? 1.0 : 0.0;
}

// ---- AdamW ------------------------------------------------------------------------------------

// The decay of elements, which must be asked for in rising order.
class Decay {
 public:
  __device__ Decay(const AdamW& p, int64_t first) : p_(p) {
    int end = p.segment_count;
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
    segment_ =
        index_ < p_.segment_count ? p_.segments[index_] : DecaySegment{INT64_MAX, INT64_MAX, 0.0f};
  }
  const AdamW& p_;
  int index_ = 0;
  DecaySegment segment_;
};

// Updates elements [begin, begin + count); count is a multiple of kWidth.
template <int kWidth>
__global__ void __launch_bounds__(kThreads)
    adamw_kernel(const __grid_constant__ AdamW p, int64_t begin, int64_t count) {
  const int64_t offset = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kWidth;
  if (offset >= count) return;
  const int64_t first = begin + offset;
  if (p.stats[kApply] == 0.0) return;
  auto w = load_pack<kWidth>(p.w + first);
  auto m = load_pack<kWidth>(p.m + first);
  auto v = load_pack<kWidth>(p.v + first);
  const auto grad = load_pack<kWidth>(p.grad + first);
  const auto grad_scale = static_cast<float>(p.stats[kGradScale]);
  const auto m_correction = static_cast<float>(1.0 / p.stats[kBias1]);
  const auto v_correction = static_cast<float>(1.0 / p.stats[kBias2]);
  Decay decay(p, first);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const float g = grad_scale * grad[i];
    m[i] = p.beta1 * m[i] + (1.0f - p.beta1) * g;
    v[i] = p.beta2 * v[i] + (1.0f - p.beta2) * (g * g);
    const float step = m[i] * m_correction / (sqrtf(v[i] * v_correction) + p.eps);
    w[i] -= p.lr * (step + decay.at(first + i) * w[i]);
  }
  store_pack(p.w + first, w);
  store_pack(p.m + first, m);
  store_pack(p.v + first, v);
  if (p.w_bf16 != nullptr) store_floats(p.w_bf16 + first, w);
}

template <int kWidth>
void launch_adamw(cudaStream_t stream, const AdamW& p, int64_t begin, int64_t count) {
  if (count == 0) return;
  adamw_kernel<kWidth><<<blocks(count, kThreads * kWidth), kThreads, 0, stream>>>(p, begin, count);
  check_launch("adamw");
}

}  // namespace

void sum(cudaStream_t stream, const Reduction& p) {
  reduce<false>(stream, "sum", p);
}

void squared_norm(cudaStream_t stream, const Reduction& p) {
  reduce<true>(stream, "squared_norm", p);
}

void finish_step(cudaStream_t stream, const FinishStep& p) {
  finish_step_kernel<<<1, 1, 0, stream>>>(p);
  check_launch("finish_step");
}

void adamw(cudaStream_t stream, const AdamW& p) {
  if (p.segment_count > kMaxDecaySegments) {
    throw std::invalid_argument("adamw: " + std::to_string(p.segment_count) +
                                " decay segments, at most " + std::to_string(kMaxDecaySegments));
  }
  const bool vectors = vectors_fit<kWidth>(p.w, p.m, p.v, p.grad, p.w_bf16);
  const int64_t whole = vectors ? p.n / kWidth * kWidth : 0;
  launch_adamw<kWidth>(stream, p, 0, whole);
  launch_adamw<1>(stream, p, whole, p.n - whole);
}

}  // namespace sbtrain::kernels
