#include <cmath>
#include <limits>

#include "gpu/device.h"
#include "kernels/primitives/math.cuh"

namespace sbtrain::test::math_test {
namespace {

using Math = GpuTest;

__global__ void math_kernel(float* exp2, float* log2, float* reciprocal, const float* x) {
  const int i = static_cast<int>(threadIdx.x);
  exp2[i] = kernels::exp2_ftz(x[i]);
  log2[i] = kernels::log2_ftz(x[i]);
  reciprocal[i] = kernels::reciprocal_ftz(x[i]);
}

struct Results {
  explicit Results(const std::vector<float>& x) {
    OnDevice<float> in(x), e(x.size()), l(x.size()), r(x.size());
    math_kernel<<<1, static_cast<unsigned>(x.size())>>>(e.data(), l.data(), r.data(), in.data());
    exp2 = e.values();
    log2 = l.values();
    reciprocal = r.values();
  }
  std::vector<float> exp2, log2, reciprocal;
};

TEST_F(Math, AgreesWithDoublePrecision) {
  std::vector<float> x;
  for (int i = 1; i <= 1000; ++i) x.push_back(static_cast<float>(i) * 0.031f);
  const Results got(x);
  for (size_t i = 0; i < x.size(); ++i) {
    const auto at = static_cast<double>(x[i]);
    EXPECT_NEAR(got.exp2[i] / std::exp2(at), 1.0, 5e-7) << at;
    EXPECT_NEAR(got.log2[i], std::log2(at), 3e-7 * std::max(1.0, std::abs(std::log2(at)))) << at;
    EXPECT_NEAR(got.reciprocal[i] * at, 1.0, 3e-7) << at;
  }
}

TEST_F(Math, HasLimits) {
  const float infinity = std::numeric_limits<float>::infinity();
  const Results got({-infinity, -200.0f, 0.0f, infinity, 128.0f});
  EXPECT_EQ(got.exp2[0], 0.0f);
  EXPECT_EQ(got.exp2[1], 0.0f);
  EXPECT_EQ(got.exp2[2], 1.0f);
  EXPECT_EQ(got.exp2[4], infinity);
  EXPECT_EQ(got.log2[2], -infinity);
  EXPECT_NEAR(got.log2[4], 7.0f, 1e-6f);
  EXPECT_EQ(got.reciprocal[2], infinity);
  EXPECT_EQ(got.reciprocal[3], 0.0f);
}

}  // namespace
}  // namespace sbtrain::test::math_test
