#include "kernels/attention/fire.h"
#include "kernels/decode_softmax.cuh"

namespace sbtrain::kernels {
namespace {

using namespace decoding;

struct AlibiBias {
  static constexpr Compiled kCompiled = Compiled::kGeneric;
  struct OfHead {
    float slope;  // 0 except on one lane
    __device__ float operator()(int distance) const {
      return -slope * static_cast<float>(distance);
    }
  };
  template <int kLanes>
  __device__ OfHead of_head(int head, int64_t, int lane) const {
    return {lane == 0 ? kLog2e * slopes.of_head[head] : 0.0f};
  }
  AlibiSlopes slopes;
};

// The lanes share the hidden units. b2 shifts all logits of the head alike, so it is left out.
struct FireBias {
  static constexpr Compiled kCompiled = Compiled::kGeneric;
  template <int kUnits>
  struct OfHead {
    float rate, r, w1[kUnits], b1[kUnits], w2[kUnits];
    __device__ float operator()(int distance) const {
      const float u = log1pf(rate * static_cast<float>(distance)) * r;
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kUnits; ++i) sum += w2[i] * fmaxf(fmaf(w1[i], u, b1[i]), 0.0f);
      return sum;
    }
  };
  template <int kLanes>
  __device__ auto of_head(int head, int64_t position, int lane) const {
    static_assert(kFireUnits == 32);
    constexpr int kUnits = kFireUnits / kLanes;
    const float c = to_float(*x.c);
    OfHead<kUnits> of;
    of.rate = fabsf(c);
    of.r = fire_query(c, to_float(*x.m), x.length, static_cast<int>(position)).r;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int unit = kUnits * lane + i;
      of.w1[i] = to_float(x.w1[unit]);
      of.b1[i] = to_float(x.b1[unit]);
      of.w2[i] = kLog2e * to_float(x.w2[head * kFireUnits + unit]);
    }
    return of;
  }
  FireParameters x;
};

}  // namespace

void softmax_decode(cudaStream_t stream, const SoftmaxDecode& p, const AlibiSlopes& slopes) {
  decode("alibi_decode", stream, Softmax<AlibiBias>{p, {slopes}});
}

void softmax_decode(cudaStream_t stream, const SoftmaxDecode& p, const FireParameters& parameters) {
  decode("fire_decode", stream, Softmax<FireBias>{p, {parameters}});
}

}  // namespace sbtrain::kernels
