// Errors of the elementary functions against fp64, over the whole range.
#include "ops/cpu/simd.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace sbtrain::ops::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// |actual - reference| in units of the last place of the reference as fp32.
double ulp_error(float actual, double reference) {
  if (std::abs(reference) > 0x1.ffffffp127) {  // rounds to infinity
    return std::isinf(actual) && (actual > 0) == (reference > 0) ? 0 : 1e9;
  }
  const int exponent = reference == 0 ? -126 : std::max(-126, std::ilogb(reference));
  return std::abs(static_cast<double>(actual) - reference) / std::ldexp(1.0, exponent - 23);
}

// Every 4099th fp32 number in [low, high].
std::vector<float> sweep(float low, float high) {
  std::vector<float> out;
  for (int64_t bits = 0; bits <= 0xffffffff; bits += 4099) {
    const auto x = std::bit_cast<float>(static_cast<uint32_t>(bits));
    if (x >= low && x <= high) out.push_back(x);
  }
  out.insert(out.end(), {low, high});
  return out;
}

template <typename F, typename Reference>
double worst_error(const std::vector<float>& inputs, F&& f, Reference&& reference) {
  std::vector<float> outputs(inputs.size());
  const float* x = inputs.data();
  float* y = outputs.data();
#pragma omp simd
  for (size_t i = 0; i < inputs.size(); ++i) y[i] = f(x[i]);
  double worst = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const double error = ulp_error(y[i], reference(static_cast<double>(x[i])));
    worst = error > worst || std::isnan(error) ? error : worst;
  }
  return worst;
}

double exact_softplus(double x) {
  return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x)));
}

TEST(Simd, Exp) {
  const auto f = [](float x) { return simd::exp(x); };
  const auto reference = [](double x) { return std::exp(x); };
  EXPECT_LE(worst_error(sweep(-kInfinity, kInfinity), f, reference), 1.5);
  EXPECT_EQ(simd::exp(0.0f), 1.0f);
  EXPECT_EQ(simd::exp(-1e30f), 0.0f);
  EXPECT_EQ(simd::exp(1e30f), kInfinity);
  EXPECT_TRUE(std::isnan(simd::exp(std::nanf(""))));
  EXPECT_TRUE(std::isnan(simd::exp(-std::nanf(""))));
}

TEST(Simd, Log1p) {
  const auto f = [](float x) { return simd::log1p(x); };
  EXPECT_LE(worst_error(sweep(0.0f, 0x1p24f), f, [](double x) { return std::log1p(x); }), 1.5);
  EXPECT_TRUE(std::isnan(simd::log1p(std::nanf(""))));
}

TEST(Simd, Softplus) {
  const auto f = [](float x) { return simd::softplus(x); };
  EXPECT_LE(worst_error(sweep(-kInfinity, kInfinity), f, exact_softplus), 2.0);
  EXPECT_EQ(simd::softplus(1e4f), 1e4f);
  EXPECT_EQ(simd::softplus(-1e4f), 0.0f);
  EXPECT_TRUE(std::isnan(simd::softplus(std::nanf(""))));
}

TEST(Simd, Sigmoid) {
  const auto f = [](float x) { return simd::sigmoid(x); };
  const auto reference = [](double x) { return 1 / (1 + std::exp(-x)); };
  EXPECT_LE(worst_error(sweep(-kInfinity, kInfinity), f, reference), 2.5);
  EXPECT_EQ(simd::sigmoid(0.0f), 0.5f);
  EXPECT_EQ(simd::sigmoid(1e4f), 1.0f);
  EXPECT_EQ(simd::sigmoid(-1e4f), 0.0f);
  EXPECT_TRUE(std::isnan(simd::sigmoid(std::nanf(""))));
}

TEST(Simd, SineAndCosineOfLargeAngles) {
  double worst = 0;
  for (int64_t position = -70000; position < 1000000; position += 13) {
    for (const double frequency : {1.0, 0.7498942093324559, 1e-4, 3.14159265358979323846 / 4}) {
      const double angle = static_cast<double>(position) * frequency;
      float sine = 0;
      float cosine = 0;
      simd::sincos(angle, sine, cosine);
      worst =
          std::max({worst, std::abs(sine - std::sin(angle)), std::abs(cosine - std::cos(angle))});
    }
  }
  EXPECT_LE(worst, 1.5e-7);
}

}  // namespace
}  // namespace sbtrain::ops::cpu
