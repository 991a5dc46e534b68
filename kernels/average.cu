#include "kernels/average.h"
#include "kernels/elementwise.cuh"
#include "kernels/optimizer.h"

namespace sbtrain::kernels {
namespace {

constexpr int kAverageWidth = 4;

struct Average {
  AverageWeights p;
  template <int kWidth>
  struct Loaded {
    Pack<float, kWidth> a, w;
  };
  template <int kWidth>
  __device__ Loaded<kWidth> load(int64_t /*row*/, int64_t col) const {
    return {load_pack<kWidth>(static_cast<const float*>(p.a) + col), load_pack<kWidth>(p.w + col)};
  }
  template <int kWidth>
  __device__ void store(int64_t /*row*/, int64_t col, Loaded<kWidth> x) const {
    if (p.stats[kApply] == 0.0) return;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) x.a[i] = p.decay * x.a[i] + (1.0f - p.decay) * x.w[i];
    store_pack(p.a + col, x.a);
  }
};

}  // namespace

void launch(cudaStream_t stream, const AverageWeights& p) {
  launch_elementwise<kAverageWidth>(stream, "average_weights", 1, p.n,
                                    vectors_fit<kAverageWidth>(p.a, p.w), Average{p});
}

}  // namespace sbtrain::kernels
