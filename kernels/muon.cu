#include "kernels/elementwise.cuh"
#include "kernels/muon.h"
#include "kernels/reduce.cuh"

namespace sbtrain::kernels {
namespace {

constexpr int kMuonWidth = 4;
constexpr int kMuonThreads = 256;

struct Momentum {
  MuonMomentum p;
  template <int kWidth>
  struct Loaded {
    Pack<float, kWidth> m, grad;
  };
  template <int kWidth>
  __device__ Loaded<kWidth> load(int64_t /*row*/, int64_t col) const {
    return {load_pack<kWidth>(static_cast<const float*>(p.m) + col),
            load_pack<kWidth>(p.grad + col)};
  }
  template <int kWidth>
  __device__ void store(int64_t /*row*/, int64_t col, Loaded<kWidth> x) const {
    const bool apply = p.stats[kApply] != 0.0;
    const auto scale = static_cast<float>(p.stats[kGradScale]);
    Pack<float, kWidth> y;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float g = scale * x.grad[i];
      x.m[i] = p.momentum * x.m[i] + g;
      const float step = p.nesterov ? g + p.momentum * x.m[i] : x.m[i];
      y[i] = apply ? step : 0.0f;
    }
    if (apply) store_pack(p.m + col, x.m);
    if (p.y != nullptr) store_floats(p.y + col, y);
  }
};

struct Update {
  MuonUpdate p;
  template <int kWidth>
  struct Loaded {
    Pack<float, kWidth> w, y;
  };
  template <int kWidth>
  __device__ Loaded<kWidth> load(int64_t /*row*/, int64_t col) const {
    return {load_pack<kWidth>(static_cast<const float*>(p.w) + col),
            load_floats<kWidth>(p.y + col)};
  }
  template <int kWidth>
  __device__ void store(int64_t /*row*/, int64_t col, Loaded<kWidth> x) const {
    if (p.stats[kApply] == 0.0) return;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      x.w[i] -= p.lr * (p.scale * x.y[i] + p.decay * x.w[i]);
    }
    store_pack(p.w + col, x.w);
    if (p.w_bf16 != nullptr) store_floats(p.w_bf16 + col, x.w);
  }
};

// Sums of squares in fixed parts, whose order depends on n alone.
template <int kWidth>
__global__ void __launch_bounds__(kMuonThreads) square_kernel(const Normalize p) {
  const int64_t packs = p.n / kWidth;
  double sum[1] = {};
  for (int64_t pack = int64_t{blockIdx.x} * kMuonThreads + threadIdx.x; pack < packs;
       pack += kSumParts * kMuonThreads) {
    const auto x = load_floats<kWidth>(p.x + pack * kWidth);
    float squares = 0;  // of a few elements, before the slower sum in double
#pragma unroll
    for (int i = 0; i < kWidth; ++i) squares += x[i] * x[i];
    sum[0] += squares;
  }
  group_sum<kMuonThreads>(sum);
  if (threadIdx.x == 0) p.scratch[blockIdx.x] = sum[0];
}

// Every block adds the parts up by itself, in the same order.
template <int kWidth>
__global__ void __launch_bounds__(kMuonThreads) normalize_kernel(const Normalize p) {
  double sum[1] = {};
  for (int64_t i = threadIdx.x; i < kSumParts; i += kMuonThreads) sum[0] += p.scratch[i];
  group_sum<kMuonThreads>(sum);
  const float factor =
      sum[0] > 0.0 ? static_cast<float>(1.0 / (double{p.margin} * sqrt(sum[0]))) : 0.0f;
  const int64_t packs = p.n / kWidth;
  for (int64_t pack = int64_t{blockIdx.x} * kMuonThreads + threadIdx.x; pack < packs;
       pack += int64_t{gridDim.x} * kMuonThreads) {
    auto x = load_floats<kWidth>(p.x + pack * kWidth);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) x[i] *= factor;
    store_floats(p.y + pack * kWidth, x);
  }
}

}  // namespace

void launch(cudaStream_t stream, const MuonMomentum& p) {
  launch_elementwise<kMuonWidth>(stream, "muon_momentum", 1, p.n,
                                 vectors_fit<kMuonWidth>(p.m, p.grad, p.y), Momentum{p});
}

void launch(cudaStream_t stream, const MuonUpdate& p) {
  launch_elementwise<kMuonWidth>(stream, "muon_update", 1, p.n,
                                 vectors_fit<kMuonWidth>(p.w, p.y, p.w_bf16), Update{p});
}

void launch(cudaStream_t stream, const Normalize& p) {
  constexpr int kVector = 8;
  if (p.n == 0) return;
  with_width<kVector>(vectors_fit<kVector>(p.x, p.y) && p.n % kVector == 0, [&](auto width) {
    constexpr int kPackWidth = decltype(width)::value;
    square_kernel<kPackWidth><<<kSumParts, kMuonThreads, 0, stream>>>(p);
    check_launch("normalize");
    constexpr int64_t kPacks = 4;  // of a thread, beside which the sum of the parts is little
    normalize_kernel<kPackWidth>
        <<<blocks(p.n, kPackWidth * kMuonThreads * kPacks), kMuonThreads, 0, stream>>>(p);
    check_launch("normalize");
  });
}

}  // namespace sbtrain::kernels
