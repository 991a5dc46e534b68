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

// Of random matrices whose sizes tensor cores take, the products in fp8 stay near those in f32: an
// element of e4m3 has an error of at most 1/16 of itself and about 1/40 on average, one of e5m2 of
// twice as much, and errors of terms of a sum are independent.
TEST(Linear, InFp8IsNearTheSameInF32) {
  constexpr int64_t T = 64, K = 96;
  const LinearSpec spec{.parts = {{"first", 32}, {"second", 48}},
                        .cols = K,
                        .init = Init::normal(0.1),
                        .alpha = kAlpha};
  const Linear layer(spec);
  const int64_t N = layer.outputs();
  const Owned x = random_normal("x", {T, K}), weight = random_normal("w", {N, K}, 0.1);
  const Owned dy = random_normal("dy", {T, N}, 1e-4), residual = random_normal("r", {T, N});
  struct Result {
    Owned y, y_scaled, dx, dw;
  };
  const auto compute = [&](Precision precision) {
    CpuStream cpu;
    cpu.stream.set_precision(precision);
    Result r{poisoned({T, N}), poisoned({T, N}), poisoned({T, K}), constant({N, K}, 1e-5)};
    Weights w, dw;
    w.add("first", weight.tensor().row_range(0, 32));
    w.add("second", weight.tensor().row_range(32, 48));
    dw.add("first", r.dw.tensor().row_range(0, 32));
    dw.add("second", r.dw.tensor().row_range(32, 48));
    layer.forward(cpu, r.y, x, w, residual);
    layer.forward_scaled(cpu, r.y_scaled, x, w, 32, 3.0f);
    layer.backward(cpu, r.dx, dw, dy, x, w);
    return r;
  };
  const Result exact = compute(Precision::kBf16), fp8 = compute(Precision::kFp8);
  const auto error = [](const Owned& a, const Owned& b) {
    return relative_error(a.tensor(), to_f64(b));
  };
  for (const double e : {error(fp8.y, exact.y), error(fp8.y_scaled, exact.y_scaled)}) {
    EXPECT_GT(e, 1e-3);  // it is fp8
    EXPECT_LT(e, 0.05);
  }
  for (const double e : {error(fp8.dx, exact.dx), error(fp8.dw, exact.dw)}) {
    EXPECT_GT(e, 0.045);  // more than two factors of e4m3 have
    EXPECT_LT(e, 0.08);
  }
}

// Where tensor cores do not take the shape, fp8 changes no bit; nor for a matrix that is no
// block's.
TEST(Linear, ThatDoesNotFitFp8StaysAsItIs) {
  const auto outputs = [](const LinearSpec& spec, int64_t tokens, Precision precision) {
    const Linear layer(spec);
    CpuStream cpu;
    cpu.stream.set_precision(precision);
    const Owned x = random_normal("x", {tokens, spec.cols});
    const Owned weight = random_normal("w", {layer.outputs(), spec.cols});
    Weights w;
    w.add("w", weight);
    const Owned y = poisoned({tokens, layer.outputs()});
    layer.forward(cpu, y, x, w);
    return to_f64(y);
  };
  LinearSpec spec{.parts = {{"w", 32}}, .cols = 48, .init = Init::normal(0.1)};
  EXPECT_NE(outputs(spec, 64, Precision::kFp8), outputs(spec, 64, Precision::kBf16));
  EXPECT_EQ(outputs(spec, 72, Precision::kFp8), outputs(spec, 72, Precision::kBf16));
  LinearSpec odd = spec;
  odd.cols = 40;
  EXPECT_EQ(outputs(odd, 64, Precision::kFp8), outputs(odd, 64, Precision::kBf16));
  spec.role = ParamRole::kTable;
  EXPECT_EQ(outputs(spec, 64, Precision::kFp8), outputs(spec, 64, Precision::kBf16));
}

}  // namespace
}  // namespace sbtrain::test
