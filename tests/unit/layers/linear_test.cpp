// The Linear layer against explicit sums, with every option of its specification.
#include "layers/linear.h"

#include <gtest/gtest.h>

#include "support/tensors.h"

namespace sbtrain::test {
namespace {

constexpr int64_t kTokens = 7;
constexpr int64_t kInputs = 5;
constexpr float kAlpha = 0.5f;

LinearSpec two_parts() {
  return {.parts = {{"first", 3}, {"second", 4}},
          .cols = kInputs,
          .init = Init::normal(0.1),
          .alpha = kAlpha};
}
LinearSpec with_bias(bool adds_bias) {
  return {.parts = {{.weight = "weight", .rows = 4, .bias = "bias"}},
          .cols = kInputs,
          .init = Init::normal(0.1),
          .alpha = kAlpha,
          .adds_bias = adds_bias};
}

TEST(Linear, DeclaresItsParametersInTheOrderOfTheProduct) {
  std::vector<TensorSpec> specs;
  LinearSpec padded = two_parts();
  padded.parts[1].stored_rows = 8;
  padded.stored_cols = 6;
  const Linear fused(padded);
  fused.add_parameters(specs);
  Linear(with_bias(true)).add_parameters(specs);
  ASSERT_EQ(specs.size(), 4u);
  EXPECT_EQ(specs[0].name, "first");
  EXPECT_EQ(specs[0].shape, (std::vector<int64_t>{3, 5}));
  EXPECT_EQ(specs[0].stored(), (std::vector<int64_t>{3, 6}));
  EXPECT_FALSE(specs[0].fused);
  EXPECT_EQ(specs[1].shape, (std::vector<int64_t>{4, 5}));
  EXPECT_EQ(specs[1].stored(), (std::vector<int64_t>{8, 6}));
  EXPECT_TRUE(specs[1].fused);
  EXPECT_TRUE(specs[1].decay);
  EXPECT_EQ(fused.outputs(), 11);
  EXPECT_FALSE(specs[2].fused);
  EXPECT_EQ(specs[3].name, "bias");
  EXPECT_EQ(specs[3].shape, std::vector<int64_t>{4});
  EXPECT_FALSE(specs[3].decay);
}

// Weights, inputs and gradients of a layer, at random.
struct Layer {
  explicit Layer(const LinearSpec& spec) : layer(spec), N(layer.outputs()) {
    int64_t row = 0;
    for (const LinearSpec::Part& part : spec.parts) {
      w.add(part.weight, weight.tensor().row_range(row, part.rows));
      dw.add(part.weight, dweight.tensor().row_range(row, part.rows));
      row += part.rows;
    }
    if (layer.has_bias()) {
      w.add("bias", bias);
      dw.add("bias", dbias);
    }
  }
  double product(int64_t t, int64_t n) const {
    double sum = 0;
    for (int64_t k = 0; k < kInputs; ++k)
      sum += x.f32()[t * kInputs + k] * weight.f32()[n * kInputs + k];
    return kAlpha * sum;
  }

  CpuStream cpu;
  Linear layer;
  int64_t N;
  Owned x = random_normal("linear 1", {kTokens, kInputs});
  Owned weight = random_normal("linear 2", {N, kInputs});
  Owned bias = random_normal("linear 3", {N});
  Owned residual = random_normal("linear 4", {kTokens, N});
  Owned dy = random_normal("linear 5", {kTokens, N});
  Owned dweight = constant({N, kInputs}, 1);
  Owned dbias = constant({N}, 1);
  Weights w, dw;
};

TEST(Linear, ForwardIsTheProductWithItsBiasAndResidual) {
  for (const LinearSpec& spec : {two_parts(), with_bias(true), with_bias(false)}) {
    for (const bool residual : {false, true}) {
      Layer l(spec);
      const Owned y = poisoned({kTokens, l.N});
      l.layer.forward(l.cpu, y, l.x, l.w, residual ? Tensor(l.residual) : Tensor());
      for (int64_t t = 0; t < kTokens; ++t) {
        for (int64_t n = 0; n < l.N; ++n) {
          double expected = l.product(t, n);
          if (l.layer.has_bias() && spec.adds_bias) expected += l.bias.f32()[n];
          if (residual) expected += l.residual.f32()[t * l.N + n];
          EXPECT_NEAR(y.f32()[t * l.N + n], expected, 1e-5);
        }
      }
    }
  }
}

TEST(Linear, BackwardAddsToWeightsAndGivesTheInputsGradient) {
  for (const LinearSpec& spec : {two_parts(), with_bias(true), with_bias(false)}) {
    for (const bool accumulate : {false, true}) {
      Layer l(spec);
      const Owned dx = constant({kTokens, kInputs}, 2);
      l.layer.backward(l.cpu, dx, l.dw, l.dy, l.x, l.w, accumulate);
      for (int64_t t = 0; t < kTokens; ++t) {
        for (int64_t k = 0; k < kInputs; ++k) {
          double expected = accumulate ? 2 : 0;
          for (int64_t n = 0; n < l.N; ++n) {
            expected += kAlpha * l.dy.f32()[t * l.N + n] * l.weight.f32()[n * kInputs + k];
          }
          EXPECT_NEAR(dx.f32()[t * kInputs + k], expected, 1e-5);
        }
      }
      for (int64_t n = 0; n < l.N; ++n) {
        double dbias = 1;
        for (int64_t t = 0; t < kTokens; ++t) dbias += l.dy.f32()[t * l.N + n];
        EXPECT_NEAR(l.dbias.f32()[n], l.layer.has_bias() ? dbias : 1, 1e-5);
        for (int64_t k = 0; k < kInputs; ++k) {
          double expected = 1;
          for (int64_t t = 0; t < kTokens; ++t) {
            expected += kAlpha * l.dy.f32()[t * l.N + n] * l.x.f32()[t * kInputs + k];
          }
          EXPECT_NEAR(l.dweight.f32()[n * kInputs + k], expected, 1e-5);
        }
      }
    }
  }
}

}  // namespace
}  // namespace sbtrain::test
