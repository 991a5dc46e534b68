#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "gpu/op_test.h"
#include "ops/activation.h"
#include "ops/linear.h"
#include "ops/scale.h"

namespace sbtrain::activation_test {
namespace {

using test::OnGpu;
using test::Owned;
using Activation = test::GpuOpTest;
using Values = std::vector<double>;

constexpr DType kF32 = DType::kF32;
constexpr DType kBF16 = DType::kBF16;

struct Case {
  int64_t rows, cols, gap;
};
constexpr Case kCases[] = {{1, 1, 0},    {5, 3, 1},    {67, 17, 2},    {300, 128, 0}, {300, 128, 3},
                           {65, 256, 8}, {700, 12, 0}, {120, 4096, 0}, {40, 2056, 0}};

TEST_F(Activation, SwigluMatchesTheCpu) {
  for (const Case& c : kCases) {
    const Owned gate_up = test::random_bf16("gate_up", {c.rows, 2 * c.cols}, 3);
    const Owned expected = test::poisoned({c.rows, c.cols});
    ops::run(cpu, ops::Swiglu{.y_TF = expected, .gate_up_T2F = gate_up});
    const OnGpu y(gpu(), kBF16, {c.rows, c.cols}, c.gap);
    ops::run(gpu(), ops::Swiglu{.y_TF = y, .gate_up_T2F = OnGpu(gpu(), gate_up, kBF16, c.gap)});
    EXPECT_LE(test::relative_error(y, expected), test::kBf16Error) << c.rows << " x " << c.cols;
    EXPECT_TRUE(y.gaps_intact());
  }
}

TEST_F(Activation, SwigluBackwardMatchesTheCpu) {
  for (const Case& c : kCases) {
    const Owned gate_up = test::random_bf16("gate_up", {c.rows, 2 * c.cols}, 3);
    const Owned dy = test::random_bf16("dy", {c.rows, c.cols});
    const Owned expected = test::poisoned({c.rows, 2 * c.cols});
    ops::run(cpu,
             ops::SwigluBackward{.dgate_up_T2F = expected, .dy_TF = dy, .gate_up_T2F = gate_up});
    const OnGpu dy_gpu(gpu(), dy, kBF16, c.gap);
    const OnGpu gate_up_gpu(gpu(), gate_up, kBF16, c.gap);
    const OnGpu dgate_up(gpu(), kBF16, {c.rows, 2 * c.cols}, c.gap);
    ops::run(gpu(), ops::SwigluBackward{
                        .dgate_up_T2F = dgate_up, .dy_TF = dy_gpu, .gate_up_T2F = gate_up_gpu});
    EXPECT_LE(test::relative_error(dgate_up, expected), test::kBf16Error)
        << c.rows << " x " << c.cols;
    EXPECT_TRUE(dgate_up.gaps_intact());
    ops::run(gpu(), ops::SwigluBackward{
                        .dgate_up_T2F = gate_up_gpu, .dy_TF = dy_gpu, .gate_up_T2F = gate_up_gpu});
    EXPECT_EQ(gate_up_gpu.raw(), dgate_up.raw());
  }
}

// For gates so large that e^gate overflows, silu is 0 or the gate.
TEST_F(Activation, LargeGates) {
  const Owned gate_up = test::generated({4, 2}, 0, [](int64_t i) {
    return i % 2 == 1 ? 2.0 : std::vector<double>{-500, -90, 90, 500}[static_cast<size_t>(i / 2)];
  });
  const OnGpu x(gpu(), gate_up, kBF16);
  const OnGpu y(gpu(), kBF16, {4, 1});
  ops::run(gpu(), ops::Swiglu{.y_TF = y, .gate_up_T2F = x});
  const Values values = y.values();
  EXPECT_EQ(values[0], 0);
  EXPECT_NEAR(values[1], 0, 1e-30);
  EXPECT_EQ(values[2], 180);
  EXPECT_EQ(values[3], 1000);
  const OnGpu dx(gpu(), kBF16, {4, 2});
  ops::run(gpu(), ops::SwigluBackward{.dgate_up_T2F = dx,
                                      .dy_TF = OnGpu(gpu(), test::constant({4, 1}, 1), kBF16),
                                      .gate_up_T2F = x});
  for (const double v : dx.values()) EXPECT_TRUE(std::isfinite(v));
}

TEST_F(Activation, SigmoidsMatchTheCpu) {
  for (const Case& c : kCases) {
    const Owned x = test::random_bf16("x", {c.rows, c.cols}, 3);
    const Owned b = test::random_bf16("b", {c.cols}, 1, 2);
    const Owned expected = test::poisoned({c.rows, c.cols});
    ops::run(cpu, ops::BiasSigmoid{.y_TH = expected, .x_TH = x, .b_H = b});
    const OnGpu y(gpu(), kF32, {c.rows, c.cols}, c.gap);
    ops::run(gpu(),
             ops::BiasSigmoid{
                 .y_TH = y, .x_TH = OnGpu(gpu(), x, kF32, c.gap), .b_H = OnGpu(gpu(), b, kBF16)});
    EXPECT_LE(test::relative_error(y, expected), test::kF32Error) << c.rows << " x " << c.cols;
    EXPECT_TRUE(y.gaps_intact());

    const Owned dy = test::random_bf16("dy", {c.rows, c.cols});
    const Owned saved = test::generated({c.rows, c.cols}, 0, [](int64_t i) {
      return 0.999f - 0.007f * static_cast<float>(i % 97);  // near 1, as gates are
    });
    ops::run(cpu, ops::SigmoidBackward{.dx_TH = expected, .dy_TH = dy, .y_TH = saved});
    const OnGpu dy_gpu(gpu(), dy, kBF16, c.gap);
    const OnGpu saved_gpu(gpu(), saved, kF32);
    const OnGpu dx(gpu(), kBF16, {c.rows, c.cols}, c.gap);
    ops::run(gpu(), ops::SigmoidBackward{.dx_TH = dx, .dy_TH = dy_gpu, .y_TH = saved_gpu});
    EXPECT_LE(test::relative_error(dx, expected), test::kBf16Error);
    EXPECT_TRUE(dx.gaps_intact());
    ops::run(gpu(), ops::SigmoidBackward{.dx_TH = dy_gpu, .dy_TH = dy_gpu, .y_TH = saved_gpu});
    EXPECT_EQ(dy_gpu.raw(), dx.raw());
  }
}

TEST_F(Activation, ScalesMatchTheCpuAndRepeat) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(std::to_string(c.rows) + " x " + std::to_string(c.cols));
    const Owned x = test::random_bf16("x", {c.rows, c.cols});
    const Owned w = test::random_bf16("w", {c.cols}, 0.3, 1);
    const Owned dy = test::random_bf16("dy", {c.rows, c.cols});
    const Owned expected = test::poisoned({c.rows, c.cols});
    const Owned dw = test::constant({c.cols}, 2);
    ops::run(cpu, ops::Scale{.y_TD = expected, .x_TD = x, .w_D = w});
    const OnGpu x_gpu(gpu(), x, kBF16, c.gap), w_gpu(gpu(), w, kBF16);
    const OnGpu y(gpu(), kBF16, {c.rows, c.cols}, c.gap);
    ops::run(gpu(), ops::Scale{.y_TD = y, .x_TD = x_gpu, .w_D = w_gpu});
    EXPECT_LE(test::relative_error(y, expected), test::kBf16Error);
    EXPECT_TRUE(y.gaps_intact());

    const OnGpu dx1(gpu(), dy, kBF16, c.gap), dx2(gpu(), dy, kBF16, c.gap);
    const OnGpu dw1(gpu(), dw, kF32), dw2(gpu(), dw, kF32);
    for (const auto& [dx, to] : {std::pair(&dx1, &dw1), std::pair(&dx2, &dw2)}) {
      ops::run(gpu(), ops::ScaleBackward{
                          .dx_TD = *dx, .dw_D = *to, .dy_TD = *dx, .x_TD = x_gpu, .w_D = w_gpu});
    }
    ops::run(cpu,
             ops::ScaleBackward{.dx_TD = expected, .dw_D = dw, .dy_TD = dy, .x_TD = x, .w_D = w});
    EXPECT_LE(test::relative_error(dx1, expected), test::kBf16Error);
    EXPECT_LE(test::relative_error(dw1, dw), test::kF32Error);
    EXPECT_TRUE(dx1.gaps_intact());
    EXPECT_EQ(dx1.raw(), dx2.raw());
    EXPECT_EQ(dw1.raw(), dw2.raw());
  }
}

TEST_F(Activation, BiasBackwardMatchesFp64AndRepeats) {
  for (const Case& c : kCases) {
    const Owned dy = test::random_bf16("dy", {c.rows, c.cols}, 1, 0.5);
    const Owned before = test::random_bf16("db", {c.cols});
    Values expected = test::to_f64(before);
    for (int64_t i = 0; i < c.rows * c.cols; ++i) {
      expected[static_cast<size_t>(i % c.cols)] += static_cast<double>(dy.f32()[i]);
    }
    const OnGpu dy_gpu(gpu(), dy, kBF16, c.gap);
    const OnGpu db1(gpu(), before, kF32);
    const OnGpu db2(gpu(), before, kF32);
    ops::run(gpu(), ops::BiasBackward{.db_N = db1, .dy_TN = dy_gpu});
    ops::run(gpu(), ops::BiasBackward{.db_N = db2, .dy_TN = dy_gpu});
    EXPECT_LE(test::relative_error(db1, expected), test::kF32Error) << c.rows << " x " << c.cols;
    EXPECT_EQ(db1.raw(), db2.raw());
  }
}

TEST_F(Activation, BiasAndGeluMatchTheCpu) {
  for (const test::RowCase& c : test::kRowCases) {
    SCOPED_TRACE(std::to_string(c.tokens) + " x " + std::to_string(c.width));
    const Owned x = test::random_bf16("x", {c.tokens, c.width}, 2);
    const Owned b = test::random_bf16("b", {c.width});
    const Owned dy = test::random_bf16("dy", {c.tokens, c.width});
    const OnGpu x_gpu(gpu(), x, kBF16, c.gap);
    const OnGpu b_gpu(gpu(), b, kBF16);
    const OnGpu dy_gpu(gpu(), dy, kBF16, c.gap);
    const Owned y = test::poisoned({c.tokens, c.width});
    const Owned dx = test::poisoned({c.tokens, c.width});
    const OnGpu y_gpu(gpu(), kBF16, {c.tokens, c.width}, c.gap);
    const OnGpu dx_gpu(gpu(), kBF16, {c.tokens, c.width}, c.gap);
    for (const bool tanh_form : {false, true}) {
      ops::BiasGelu forward{.y_TF = y, .x_TF = x, .b_F = b, .tanh_form = tanh_form};
      ops::BiasGeluBackward backward{
          .dx_TF = dx, .dy_TF = dy, .x_TF = x, .b_F = b, .tanh_form = tanh_form};
      ops::run(cpu, forward);
      ops::run(cpu, backward);
      forward = {.y_TF = y_gpu, .x_TF = x_gpu, .b_F = b_gpu, .tanh_form = tanh_form};
      backward = {
          .dx_TF = dx_gpu, .dy_TF = dy_gpu, .x_TF = x_gpu, .b_F = b_gpu, .tanh_form = tanh_form};
      ops::run(gpu(), forward);
      ops::run(gpu(), backward);
      EXPECT_LE(test::relative_error(y_gpu, y), test::kBf16Error) << tanh_form;
      EXPECT_LE(test::relative_error(dx_gpu, dx), test::kBf16Error) << tanh_form;
      EXPECT_TRUE(y_gpu.gaps_intact() && dx_gpu.gaps_intact());
    }
    ops::run(cpu, ops::AddBias{.y_TN = x, .b_N = b});
    ops::run(gpu(), ops::AddBias{.y_TN = x_gpu, .b_N = b_gpu});
    EXPECT_LE(test::relative_error(x_gpu, x), test::kBf16Error);
    EXPECT_TRUE(x_gpu.gaps_intact());
  }
}

// Where a power of the input would overflow.
TEST_F(Activation, GeluOfLargeInputsIsFinite) {
  const std::vector<float> values = {-3e38f, -1e19f, -30.0f, 30.0f, 1e19f, 3e38f, 0.0f, 1.0f};
  const Owned x = test::poisoned({1, 8});
  std::copy(values.begin(), values.end(), x.f32());
  const OnGpu x_gpu(gpu(), x, kBF16);
  const OnGpu b_gpu(gpu(), test::constant({8}, 0.0f), kBF16);
  const OnGpu dy_gpu(gpu(), test::constant({1, 8}, 1.0f), kBF16);
  const auto rounded = [](float value) { return test::from_bf16(test::to_bf16(value)); };
  for (const bool tanh_form : {false, true}) {
    const OnGpu y(gpu(), kBF16, {1, 8});
    const OnGpu dx(gpu(), kBF16, {1, 8});
    ops::run(gpu(), ops::BiasGelu{.y_TF = y, .x_TF = x_gpu, .b_F = b_gpu, .tanh_form = tanh_form});
    ops::run(
        gpu(),
        ops::BiasGeluBackward{
            .dx_TF = dx, .dy_TF = dy_gpu, .x_TF = x_gpu, .b_F = b_gpu, .tanh_form = tanh_form});
    const Values outputs = y.values();
    const Values gradients = dx.values();
    for (size_t i = 0; i < 6; ++i) {
      EXPECT_EQ(outputs[i], values[i] > 0 ? rounded(values[i]) : 0.0) << values[i];
      EXPECT_EQ(gradients[i], values[i] > 0 ? 1.0 : 0.0) << values[i];
    }
  }
}

}  // namespace
}  // namespace sbtrain::activation_test
