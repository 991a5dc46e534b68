// The short convolution on the GPU against the CPU backend.
#include <gtest/gtest.h>

#include "gpu/op_test.h"
#include "ops/short_conv.h"

namespace sbtrain::short_conv_test {
namespace {

using test::OnGpu;
using test::Owned;
using ShortConv = test::GpuOpTest;

constexpr DType kF32 = DType::kF32;
constexpr DType kBF16 = DType::kBF16;
constexpr DType kI32 = DType::kI32;

// The positions in documents of 1, 2, 3, ... tokens, of which the last is cut off.
std::vector<int32_t> positions_of(int64_t tokens) {
  std::vector<int32_t> positions;
  for (int32_t length = 1; static_cast<int64_t>(positions.size()) < tokens; ++length) {
    for (int32_t i = 0; i < length; ++i) positions.push_back(i);
  }
  positions.resize(static_cast<size_t>(tokens));
  return positions;
}

TEST_F(ShortConv, MatchesTheCpuAndRepeats) {
  for (const test::RowCase& c : test::kRowCases) {
    SCOPED_TRACE(std::to_string(c.tokens) + " x " + std::to_string(c.width));
    const std::vector<int64_t> shape = {c.tokens, c.width};
    const Owned u = test::random_bf16("u", shape);
    const Owned gate = test::random_bf16("gate", shape);
    const Owned dy = test::random_bf16("dy", shape);
    const Owned w = test::random_bf16("w", {c.width, ops::kShortConv});
    const Owned b = test::random_bf16("b", {c.width});
    const Owned gate_bias = test::random_bf16("gate bias", {c.width});
    const Owned positions = test::integers(positions_of(c.tokens));
    const ops::ShortConvWeights weights = {.w_D3 = w, .b_D = b, .gate_bias_D = gate_bias};
    const OnGpu w_gpu(gpu(), w, kBF16), b_gpu(gpu(), b, kBF16);
    const OnGpu gate_bias_gpu(gpu(), gate_bias, kBF16);
    const ops::ShortConvWeights weights_gpu = {
        .w_D3 = w_gpu, .b_D = b_gpu, .gate_bias_D = gate_bias_gpu};
    const OnGpu u_gpu(gpu(), u, kBF16, c.gap), gate_gpu(gpu(), gate, kBF16, c.gap);
    const OnGpu dy_gpu(gpu(), dy, kBF16, c.gap), positions_gpu(gpu(), positions, kI32);

    const Owned y = test::poisoned(shape);
    const OnGpu y_gpu(gpu(), kBF16, shape, c.gap);
    ops::run(cpu,
             ops::ShortConvForward{
                 .y_TD = y, .u_TD = u, .gate_TD = gate, .positions_T = positions, .w = weights});
    ops::run(gpu(), ops::ShortConvForward{.y_TD = y_gpu,
                                          .u_TD = u_gpu,
                                          .gate_TD = gate_gpu,
                                          .positions_T = positions_gpu,
                                          .w = weights_gpu});
    EXPECT_LE(test::relative_error(y_gpu, y), test::kBf16Error);
    EXPECT_TRUE(y_gpu.gaps_intact());

    const Owned dw = test::random_bf16("dw", {c.width, ops::kShortConv});
    const Owned db = test::random_bf16("db", {c.width});
    const Owned dgate_bias = test::random_bf16("dgate bias", {c.width});
    std::vector<std::vector<uint8_t>> bits[2];
    std::vector<double> errors;
    for (auto& mine : bits) {
      const OnGpu du_gpu(gpu(), kBF16, shape, c.gap), dgate_gpu(gpu(), kBF16, shape, c.gap);
      const OnGpu dw_gpu(gpu(), dw, kF32), db_gpu(gpu(), db, kF32);
      const OnGpu dgate_bias_gpu(gpu(), dgate_bias, kF32);
      ops::run(gpu(), ops::ShortConvBackward{
                          .du_TD = du_gpu,
                          .dgate_TD = dgate_gpu,
                          .dy_TD = dy_gpu,
                          .u_TD = u_gpu,
                          .gate_TD = gate_gpu,
                          .positions_T = positions_gpu,
                          .dw = {.w_D3 = dw_gpu, .b_D = db_gpu, .gate_bias_D = dgate_bias_gpu},
                          .w = weights_gpu});
      mine = {du_gpu.raw(), dgate_gpu.raw(), dw_gpu.raw(), db_gpu.raw(), dgate_bias_gpu.raw()};
      EXPECT_TRUE(du_gpu.gaps_intact() && dgate_gpu.gaps_intact());
      if (&mine == &bits[0]) continue;
      const Owned du = test::poisoned(shape);
      const Owned dgate = test::poisoned(shape);
      ops::run(cpu, ops::ShortConvBackward{.du_TD = du,
                                           .dgate_TD = dgate,
                                           .dy_TD = dy,
                                           .u_TD = u,
                                           .gate_TD = gate,
                                           .positions_T = positions,
                                           .dw = {.w_D3 = dw, .b_D = db, .gate_bias_D = dgate_bias},
                                           .w = weights});
      EXPECT_LE(test::relative_error(du_gpu, du), test::kBf16Error);
      EXPECT_LE(test::relative_error(dgate_gpu, dgate), test::kBf16Error);
      EXPECT_LE(test::relative_error(dw_gpu, dw), test::kF32Error);
      EXPECT_LE(test::relative_error(db_gpu, db), test::kF32Error);
      EXPECT_LE(test::relative_error(dgate_bias_gpu, dgate_bias), test::kF32Error);
    }
    EXPECT_TRUE(bits[0] == bits[1]) << "repeated";
  }
}

// Single steps from the first token on, with a poisoned state, give the outputs of whole documents.
TEST_F(ShortConv, Decodes) {
  constexpr int64_t kTokens = 6;
  for (const int64_t width : {5, 64, 768}) {
    const Owned u = test::random_bf16("u", {kTokens, width});
    const Owned gate = test::random_bf16("gate", {kTokens, width});
    const Owned w = test::random_bf16("w", {width, ops::kShortConv});
    const Owned b = test::random_bf16("b", {width});
    const OnGpu u_gpu(gpu(), u, kBF16, 8), gate_gpu(gpu(), gate, kBF16, 8);
    const OnGpu w_gpu(gpu(), w, kBF16), b_gpu(gpu(), b, kBF16);
    const ops::ShortConvWeights weights = {.w_D3 = w, .b_D = b, .gate_bias_D = b};
    const ops::ShortConvWeights weights_gpu = {.w_D3 = w_gpu, .b_D = b_gpu, .gate_bias_D = b_gpu};
    const Owned y = test::poisoned({kTokens, width});
    const Owned positions = test::integers({0, 1, 2, 3, 4, 5});
    ops::run(cpu,
             ops::ShortConvForward{
                 .y_TD = y, .u_TD = u, .gate_TD = gate, .positions_T = positions, .w = weights});
    const OnGpu state(gpu(), kBF16, {1, 2 * width});
    for (int32_t t = 0; t < kTokens; ++t) {
      const OnGpu out(gpu(), kBF16, {1, width}, 3);
      const OnGpu position(gpu(), test::integers({t}), kI32);
      ops::run(gpu(), ops::ShortConvDecode{.y_BD = out,
                                           .u_BD = u_gpu.tensor().row_range(t, 1),
                                           .gate_BD = gate_gpu.tensor().row_range(t, 1),
                                           .state_B2D = state,
                                           .positions_B = position,
                                           .w = weights_gpu});
      EXPECT_LE(test::relative_error(out, y.tensor().row_range(t, 1)), test::kBf16Error)
          << "width " << width << ", token " << t;
      EXPECT_TRUE(out.gaps_intact());
    }
  }
}

}  // namespace
}  // namespace sbtrain::short_conv_test
