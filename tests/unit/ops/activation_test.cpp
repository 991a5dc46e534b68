#include "ops/activation.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>
#include <utility>

#include "ops/scale.h"
#include "support/tensors.h"

namespace sbtrain {
namespace {

using test::CpuStream;
using test::Owned;
using Values = std::vector<double>;

double sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}

// silu(gate) * up, on rows of 2F numbers.
Values swiglu_rows(const Values& gate_up, size_t inner) {
  Values y;
  for (size_t row = 0; row < gate_up.size(); row += 2 * inner) {
    for (size_t i = 0; i < inner; ++i) {
      const double gate = gate_up[row + i];
      y.push_back(gate * sigmoid(gate) * gate_up[row + inner + i]);
    }
  }
  return y;
}

TEST(Swiglu, MatchesReference) {
  CpuStream s;
  for (const auto& [tokens, inner] : {std::pair{1, 1}, {3, 5}, {33, 344}, {200, 131}}) {
    const Owned x = test::random_normal("x", {tokens, 2 * inner}, 4, 0, 3);
    const Owned y = test::poisoned({tokens, inner}, 1);
    ops::run(s, ops::Swiglu{.y_TF = y, .gate_up_T2F = x});
    EXPECT_LE(test::relative_error(y, swiglu_rows(test::to_f64(x), static_cast<size_t>(inner))),
              1e-6);
    EXPECT_TRUE(y.gaps_intact());
  }
}

TEST(Swiglu, SaturatesWithoutNan) {
  CpuStream s;
  const Owned x = test::generated({2, 2}, 0, [](int64_t i) { return i % 2 ? 1 : i ? -1e4 : 1e4; });
  const Owned y = test::poisoned({2, 1});
  const Owned dx = test::poisoned({2, 2});
  ops::run(s, ops::Swiglu{.y_TF = y, .gate_up_T2F = x});
  EXPECT_EQ(test::to_f64(y), (Values{1e4, 0}));
  ops::run(s, ops::SwigluBackward{
                  .dgate_up_T2F = dx, .dy_TF = test::constant({2, 1}, 1), .gate_up_T2F = x});
  EXPECT_EQ(test::to_f64(dx), (Values{1, 1e4, 0, 0}));
}

TEST(SwigluBackward, MatchesFiniteDifferences) {
  CpuStream s;
  for (const auto& [tokens, inner] : {std::pair{1, 1}, {3, 7}, {9, 33}}) {
    const Owned x = test::random_normal("x", {tokens, 2 * inner}, 2, 0, 3);
    const Owned dy = test::random_normal("dy", {tokens, inner}, 1, 0, 1);
    const Owned dx = test::poisoned({tokens, 2 * inner}, 2);
    const Values G = test::to_f64(dy);
    const auto objective = [&, n = static_cast<size_t>(inner)](const Values& v) {
      const Values y = swiglu_rows(v, n);
      double sum = 0;
      for (size_t i = 0; i < y.size(); ++i) sum += y[i] * G[i];
      return sum;
    };
    ops::run(s, ops::SwigluBackward{.dgate_up_T2F = dx, .dy_TF = dy, .gate_up_T2F = x});
    EXPECT_LE(test::relative_error(dx, test::numeric_gradient(objective, test::to_f64(x))), 1e-6);
    EXPECT_TRUE(dx.gaps_intact());
  }
}

double gelu(double z, bool tanh_form) {
  if (!tanh_form) return 0.5 * z * std::erfc(-z * std::sqrt(0.5));
  return 0.5 * z * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (z + 0.044715 * z * z * z)));
}

TEST(BiasGelu, BothFormsMatchFp64) {
  CpuStream s;
  for (const bool tanh_form : {false, true}) {
    for (const auto& [tokens, inner] : {std::pair{2, 3}, {5, 3}, {700, 24}}) {
      const Owned x = test::random_normal("x", {tokens, inner}, 3, 0, 2);
      const Owned b = test::random_normal("b", {inner});
      const Owned y = test::poisoned({tokens, inner}, 1);
      ops::run(s, ops::BiasGelu{.y_TF = y, .x_TF = x, .b_F = b, .tanh_form = tanh_form});
      Values expected = test::to_f64(x);
      for (size_t i = 0; i < expected.size(); ++i) {
        // As it is rounded: far below 0 the function magnifies what rounding makes of its argument.
        const float z = static_cast<float>(expected[i]) + b.f32()[i % static_cast<size_t>(inner)];
        expected[i] = gelu(static_cast<double>(z), tanh_form);
      }
      EXPECT_LE(test::relative_error(y, expected), 1e-6) << tanh_form;
      EXPECT_TRUE(y.gaps_intact());
    }
  }
}

TEST(BiasGeluBackward, BothFormsMatchFiniteDifferences) {
  CpuStream s;
  for (const bool tanh_form : {false, true}) {
    const Owned x = test::random_normal("x", {31, 5}, 2, 0, 1);
    const Owned b = test::random_normal("b", {5});
    const Owned dx = test::random_normal("dy", {31, 5}, 1, 0, 2);  // in place
    const Values G = test::to_f64(dx);
    const auto objective = [&](const Values& v) {
      double sum = 0;
      for (size_t i = 0; i < v.size(); ++i) sum += G[i] * gelu(v[i] + b.f32()[i % 5], tanh_form);
      return sum;
    };
    ops::run(s, ops::BiasGeluBackward{
                    .dx_TF = dx, .dy_TF = dx, .x_TF = x, .b_F = b, .tanh_form = tanh_form});
    EXPECT_LE(test::relative_error(dx, test::numeric_gradient(objective, test::to_f64(x))), 2e-6)
        << tanh_form;
    EXPECT_TRUE(dx.gaps_intact());
  }
}

// Where a power of the input would overflow.
TEST(BiasGelu, IsFiniteForLargeInputs) {
  CpuStream s;
  for (const bool tanh_form : {false, true}) {
    for (const float z : {-3e38f, -1e19f, -30.0f, 30.0f, 1e19f, 3e38f}) {
      const Owned x = test::constant({1, 1}, z);
      const Owned zero = test::constant({1}, 0.0f);
      const Owned one = test::constant({1, 1}, 1.0f);
      const Owned y = test::poisoned({1, 1});
      const Owned dx = test::poisoned({1, 1});
      ops::run(s, ops::BiasGelu{.y_TF = y, .x_TF = x, .b_F = zero, .tanh_form = tanh_form});
      ops::run(s, ops::BiasGeluBackward{
                      .dx_TF = dx, .dy_TF = one, .x_TF = x, .b_F = zero, .tanh_form = tanh_form});
      EXPECT_EQ(y.f32()[0], z > 0 ? z : 0.0f) << z;
      EXPECT_EQ(dx.f32()[0], z > 0 ? 1.0f : 0.0f) << z;
    }
  }
}

TEST(BiasSigmoid, MatchesReference) {
  CpuStream s;
  for (const auto& [tokens, heads] : {std::pair{1, 1}, {5, 3}, {700, 24}}) {
    const Owned x = test::random_normal("x", {tokens, heads}, 3, 0, 2);
    const Owned b = test::random_normal("b", {heads});
    const Owned y = test::poisoned({tokens, heads}, 1);
    ops::run(s, ops::BiasSigmoid{.y_TH = y, .x_TH = x, .b_H = b});
    Values expected = test::to_f64(x);
    for (size_t i = 0; i < expected.size(); ++i) {
      expected[i] = sigmoid(expected[i] + b.f32()[i % static_cast<size_t>(heads)]);
    }
    EXPECT_LE(test::relative_error(y, expected), 1e-6);
    EXPECT_TRUE(y.gaps_intact());
  }
}

TEST(SigmoidBackward, MatchesFiniteDifferences) {
  CpuStream s;
  const Owned x = test::random_normal("x", {11, 3}, 2);
  const Owned y = test::poisoned({11, 3});
  const Owned dy = test::random_normal("dy", {11, 3}, 1, 0, 2);
  const Owned dx = test::poisoned({11, 3}, 1);
  ops::run(s, ops::BiasSigmoid{.y_TH = y, .x_TH = x, .b_H = test::constant({3}, 0.25)});
  ops::run(s, ops::SigmoidBackward{.dx_TH = dx, .dy_TH = dy, .y_TH = y});
  const Values G = test::to_f64(dy);
  const auto objective = [&](const Values& v) {
    double sum = 0;
    for (size_t i = 0; i < v.size(); ++i) sum += G[i] * sigmoid(v[i] + 0.25);
    return sum;
  };
  EXPECT_LE(test::relative_error(dx, test::numeric_gradient(objective, test::to_f64(x))), 1e-6);
  EXPECT_TRUE(dx.gaps_intact());
}

TEST(Scale, MatchesReferenceAndFiniteDifferences) {
  CpuStream s;
  for (const auto& [tokens, width] : {std::pair{1, 1}, {5, 3}, {700, 24}}) {
    const Owned x = test::random_normal("x", {tokens, width}, 1, 0, 2);
    const Owned w = test::random_normal("w", {width});
    const Owned y = test::poisoned({tokens, width}, 1);
    ops::run(s, ops::Scale{.y_TD = y, .x_TD = x, .w_D = w});
    const Values factors = test::to_f64(w);
    const Values from = test::to_f64(x);
    Values expected = from;
    for (size_t i = 0; i < expected.size(); ++i) expected[i] *= factors[i % factors.size()];
    EXPECT_LE(test::relative_error(y, expected), 1e-6);
    EXPECT_TRUE(y.gaps_intact());

    // The gradient of sum(dy y): by x it is dy w, and by w the sums over tokens of dy x. In place.
    const Owned dy = test::random_normal("dy", {tokens, width}, 1, 0, 2);
    const Values outer = test::to_f64(dy);
    const Owned dw = test::constant({width}, 2);
    ops::run(s, ops::ScaleBackward{.dx_TD = dy, .dw_D = dw, .dy_TD = dy, .x_TD = x, .w_D = w});
    Values by_w(factors.size(), 2.0);
    for (size_t i = 0; i < outer.size(); ++i) {
      by_w[i % factors.size()] += outer[i] * from[i];
      expected[i] = outer[i] * factors[i % factors.size()];
    }
    EXPECT_LE(test::relative_error(dy, expected), 1e-6);
    EXPECT_LE(test::relative_error(dw, by_w), 1e-5);
  }
}

}  // namespace
}  // namespace sbtrain
