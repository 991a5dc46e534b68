#include <algorithm>

#include "gpu/device.h"
#include "kernels/primitives/lanes.cuh"

namespace sbtrain::test::lanes_test {
namespace {

using namespace kernels;  // NOLINT: nearly every name here is from there
using Lanes = GpuTest;

constexpr int kThreads = 64;  // two warps
constexpr float kOutside = -7.0f;

enum Result {
  kQuadSum,
  kQuadMax,
  kRight1,
  kRight2,
  kRight3,
  kLeft1,
  kLeft2,
  kLeft3,
  kRow0,
  kRow3,
  kMin,
  kMax,
  kResults
};

__global__ void lanes_kernel(float* out, const float* in) {
  const float x = in[threadIdx.x];
  float* const to = out + threadIdx.x * kResults;
  to[kQuadSum] = quad_sum(x);
  to[kQuadMax] = quad_max(x);
  for (int n = 1; n <= 3; ++n) {
    to[kRight1 + n - 1] = from_right(x, n, kOutside);
    to[kLeft1 + n - 1] = from_left(x, n, kOutside);
  }
  to[kRow0] = of_lane_row(x, 0);
  to[kRow3] = of_lane_row(x, 3);
  to[kMin] = warp_min(x);
  to[kMax] = warp_max(x);
}

// Every lane has a number that no sum of other lanes' numbers equals.
TEST_F(Lanes, ExchangeReachesTheRightLanes) {
  std::vector<float> x(kThreads);
  for (int i = 0; i < kThreads; ++i) {
    x[static_cast<size_t>(i)] = static_cast<float>((1 << (i % 4 * 5)) * (1 + i * 7 % 31)) / 8;
  }
  OnDevice<float> in(x), out(kThreads * kResults);
  lanes_kernel<<<1, kThreads>>>(out.data(), in.data());
  const std::vector<float> got = out.values();
  for (int i = 0; i < kThreads; ++i) {
    const auto result = [&](int which) { return got[static_cast<size_t>(i * kResults + which)]; };
    const int q = i % 4, warp = i / 32 * 32;
    const float* quad = x.data() + i - q;
    EXPECT_EQ(result(kQuadSum), quad[0] + quad[1] + quad[2] + quad[3]) << i;
    EXPECT_EQ(result(kQuadMax), *std::max_element(quad, quad + 4)) << i;
    for (int n = 1; n <= 3; ++n) {
      EXPECT_EQ(result(kRight1 + n - 1), q + n < 4 ? quad[q + n] : kOutside) << i << " " << n;
      EXPECT_EQ(result(kLeft1 + n - 1), q >= n ? quad[q - n] : kOutside) << i << " " << n;
    }
    EXPECT_EQ(result(kRow0), x[static_cast<size_t>(warp + i % 32 / 4)]) << i;
    EXPECT_EQ(result(kRow3), x[static_cast<size_t>(warp + i % 32 / 4 + 24)]) << i;
    EXPECT_EQ(result(kMin), *std::min_element(x.data() + warp, x.data() + warp + 32)) << i;
    EXPECT_EQ(result(kMax), *std::max_element(x.data() + warp, x.data() + warp + 32)) << i;
  }
}

}  // namespace
}  // namespace sbtrain::test::lanes_test
