// Casts to fp8 and the emulated products against fp64.
#include "ops/fp8.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.h"
#include "core/fp8.h"
#include "support/tensors.h"

namespace sbtrain {
namespace {

using test::CpuStream;
using test::Owned;
using Values = std::vector<double>;

constexpr DType kFormats[] = {DType::kE4M3, DType::kE5M2};

// A matrix in fp8 and what it holds, in fp64.
struct Cast {
  Cast(CpuStream& s, const Tensor& x, DType dtype)
      : y(dtype, {x.rows(), x.cols()}), y_t(dtype, {x.cols(), x.rows()}) {
    ops::run(s, ops::Amax{.amax_1 = amax, .x_RC = x});
    ops::run(
        s,
        ops::CastFp8{
            .y_RC = y, .y_CR = y_t, .inverse_scale_1 = inverse_scale, .x_RC = x, .amax_1 = amax});
  }
  double value(int64_t r, int64_t c) const {
    const Tensor& t = y;
    return double{fp8_to_f32(t.fp8()[r * t.row_stride + c], t.dtype)} * *inverse_scale.f32();
  }
  ops::Fp8Matrix matrix() const { return {y, inverse_scale}; }
  Owned y, y_t;
  Owned amax = test::poisoned({1}), inverse_scale = test::poisoned({1});
};

TEST(Amax, IsTheLargestAbsoluteValue) {
  CpuStream s;
  for (const int64_t rows : {1, 3, 300}) {
    Owned x = test::random_normal("x", {rows, 129}, 1, 0, 5);
    x.at(rows - 1, 77) = -50.0f;
    const Owned amax = test::poisoned({1});
    ops::run(s, ops::Amax{.amax_1 = amax, .x_RC = x});
    EXPECT_EQ(*amax.f32(), 50.0f);
    x.at(0, 3) = std::numeric_limits<float>::infinity();
    ops::run(s, ops::Amax{.amax_1 = amax, .x_RC = x});
    EXPECT_EQ(*amax.f32(), std::numeric_limits<float>::infinity());
    x.at(rows - 1, 0) = -std::numeric_limits<float>::quiet_NaN();
    ops::run(s, ops::Amax{.amax_1 = amax, .x_RC = x});
    EXPECT_TRUE(std::isnan(*amax.f32()));
  }
}

TEST(CastFp8, KeepsEveryElementToHalfASpacing) {
  CpuStream s;
  for (const DType dtype : kFormats) {
    for (const double std : {1e-8, 1.0, 1e6}) {
      const Owned x = test::random_normal("x", {67, 129}, std, 0, 5);
      const Cast cast(s, x, dtype);
      const double smallest =
          double{fp8_to_f32(1, dtype)} * *cast.inverse_scale.f32();  // spacing of subnormals
      for (int64_t r = 0; r < 67; ++r) {
        for (int64_t c = 0; c < 129; ++c) {
          const double exact = x.tensor().f32()[r * 134 + c];
          const double half = std::ldexp(1.0, -fp8_format(dtype).mantissa_bits - 1);
          // Two roundings of f32 beside that of fp8.
          const double bound = std::max(half * std::abs(exact), smallest / 2) * (1 + 1e-6);
          EXPECT_NEAR(cast.value(r, c), exact, bound);
          EXPECT_EQ(cast.y_t.tensor().fp8()[c * 67 + r], cast.y.tensor().fp8()[r * 129 + c]);
        }
      }
    }
  }
}

TEST(CastFp8, OfZerosHasTheScaleOne) {
  CpuStream s;
  const Cast cast(s, test::constant({16, 16}, 0), DType::kE4M3);
  EXPECT_EQ(*cast.inverse_scale.f32(), 1.0f);
  EXPECT_EQ(cast.value(3, 3), 0.0);
}

// One number that is not finite spoils the whole matrix, and so the loss or the gradient's norm.
TEST(CastFp8, KeepsWhatIsNotFinite) {
  CpuStream s;
  for (const float bad : {NAN, HUGE_VALF, -HUGE_VALF}) {
    Owned x = test::random_normal("x", {16, 32});
    x.at(2, 5) = bad;
    const Cast a(s, x, DType::kE4M3), b(s, test::random_normal("w", {16, 32}), DType::kE4M3);
    const Owned y = test::poisoned({16, 16});
    ops::run(s, ops::Fp8Product{.y_MN = y, .a_MK = a.matrix(), .b_NK = b.matrix()});
    for (int64_t n = 0; n < 16; ++n) EXPECT_FALSE(std::isfinite(y.f32()[2 * 16 + n]));
  }
}

TEST(Fp8Product, IsTheProductOfTheRoundedFactors) {
  CpuStream s;
  for (const DType a_type : kFormats) {
    for (const bool with_residual : {false, true}) {
      constexpr int64_t M = 80, N = 48, K = 272;
      const Cast a(s, test::random_normal("a", {M, K}), a_type);
      const Cast b(s, test::random_normal("b", {N, K}, 0.02), DType::kE4M3);
      const Owned residual = test::random_normal("r", {M, N});
      const Owned y = test::poisoned({M, N}, 8);
      ops::run(s, ops::Fp8Product{.y_MN = y,
                                  .a_MK = a.matrix(),
                                  .b_NK = b.matrix(),
                                  .alpha = 0.5f,
                                  .residual = with_residual ? residual.tensor() : Tensor()});
      Values expected;
      for (int64_t m = 0; m < M; ++m) {
        for (int64_t n = 0; n < N; ++n) {
          double sum = 0;
          for (int64_t k = 0; k < K; ++k) sum += a.value(m, k) * b.value(n, k);
          expected.push_back(0.5 * sum + (with_residual ? residual.f32()[m * N + n] : 0));
        }
      }
      EXPECT_LT(test::relative_error(y, expected), 1e-6);
      EXPECT_TRUE(y.gaps_intact());
    }
  }
}

TEST(Fp8Product, RefusesOldGpus) {
  Target old(Backend::kCuda);
  old.sm = 80;
  Memory memory = Memory::planning(old);
  Stream s(memory);
  const auto fp8 = [&] { return s.scratch("x", DType::kE4M3, {16, 16}); };
  const Buffer a = fp8(), b = fp8(), y = s.scratch("y", DType::kBF16, {16, 16});
  const Buffer scale = s.scratch("scale", DType::kF32, {1});
  const ops::Fp8Product op{.y_MN = y, .a_MK = {a, scale}, .b_NK = {b, scale}};
  try {
    ops::run(s, op);
    FAIL() << "it was taken";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ExitCode::kConfig);
    EXPECT_NE(std::string(e.what()).find("fp8 products need compute capability 8.9 or newer"),
              std::string::npos);
  }
}

TEST(Fp8Scales, AreThoseOfTheLargestOfAllRanks) {
  CpuStream s;
  Owned x = test::random_normal("x", {3, 5});
  for (int64_t n = 0; n < 5; ++n) {
    for (int64_t w = 0; w < 3; ++w) x.at(w, n) = std::fabs(x.at(w, n));
  }
  x.at(1, 0) = 100;
  for (int64_t w = 0; w < 3; ++w) x.at(w, 1) = 0;
  x.at(2, 2) = std::numeric_limits<float>::quiet_NaN();
  const Owned amax = test::poisoned({5}), inverse_scale = test::poisoned({5, 1});
  ops::run(s, ops::Fp8Scales{.amax_N = amax, .inverse_scale_N1 = inverse_scale, .x_WN = x});
  EXPECT_EQ(amax.f32()[0], 100.0f);
  EXPECT_EQ(inverse_scale.f32()[0], 1.0f / (448.0f / 100.0f));
  EXPECT_EQ(amax.f32()[1], 0.0f);
  EXPECT_EQ(inverse_scale.f32()[1], 1.0f);
  EXPECT_TRUE(std::isnan(amax.f32()[2]));
  for (int64_t n = 3; n < 5; ++n) {
    EXPECT_EQ(amax.f32()[n], std::max({x.at(0, n), x.at(1, n), x.at(2, n)}));
  }
}

TEST(TransposeFp8, GivesTheCastsTranspose) {
  CpuStream s;
  for (const DType dtype : kFormats) {
    const Cast cast(s, test::random_normal("x", {67, 130}), dtype);
    const Owned y_t(dtype, {130, 67});
    ops::run(s, ops::TransposeFp8{.y_CR = y_t, .x_RC = cast.y});
    EXPECT_TRUE(test::bitwise_equal(y_t, cast.y_t));
  }
}

}  // namespace
}  // namespace sbtrain
