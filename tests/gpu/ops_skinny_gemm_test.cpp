// Products of few rows: the right sums, and the same bits whatever the other rows are.
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "gpu/op_test.h"
#include "kernels/scratch_sizes.h"
#include "ops/linear.h"
#include "ops/sampling.h"

namespace sbtrain::skinny_gemm_test {
namespace {

using test::OnGpu;
using test::Owned;
using SkinnyGemm = test::GpuOpTest;

constexpr DType kBF16 = DType::kBF16;
constexpr DType kF32 = DType::kF32;

struct Case {
  int64_t outputs, channels, gap;
};
// Few outputs and many, channels that end within a vector, a chunk of 32, and a round of all warps.
constexpr Case kCases[] = {{1, 1, 0},      {16, 32, 0},     {40, 96, 8},
                           {37, 299, 1},   {509, 128, 0},   {3200, 1024, 0},
                           {6200, 512, 8}, {1536, 4096, 0}, {300, 2736, 3}};
constexpr int64_t kRows[] = {1, 2, 7, 8, 9, 16, 17, 32, 33, 63, 64};

TEST_F(SkinnyGemm, MatchTheCpu) {
  for (const Case& c : kCases) {
    const Owned w = test::random_bf16("w", {c.outputs, c.channels});
    const OnGpu w_gpu(gpu(), w, kBF16, c.gap);
    for (const int64_t rows : kRows) {
      const Owned x = test::random_bf16("x", {rows, c.channels});
      const Owned residual = test::random_bf16("residual", {rows, c.outputs});
      const OnGpu x_gpu(gpu(), x, kBF16, c.gap);
      const Owned expected = test::poisoned({rows, c.outputs});
      for (const bool adds : {false, true}) {
        ops::run(cpu, ops::Linear{.y_TN = expected,
                                  .x_TK = x,
                                  .w_NK = w,
                                  .alpha = 0.5f,
                                  .residual = adds ? residual.tensor() : Tensor()});
        for (const DType dtype : {kBF16, kF32}) {
          const OnGpu y(gpu(), dtype, {rows, c.outputs}, c.gap);
          const OnGpu residual_gpu(gpu(), residual, dtype, c.gap);
          ops::run(gpu(), ops::Linear{.y_TN = y,
                                      .x_TK = x_gpu,
                                      .w_NK = w_gpu,
                                      .alpha = 0.5f,
                                      .residual = adds ? residual_gpu.tensor() : Tensor()});
          EXPECT_LE(test::relative_error(y, expected),
                    dtype == kF32 ? test::kF32Error : test::kBf16Error)
              << rows << " rows, " << c.outputs << " outputs of " << c.channels << " channels";
          EXPECT_TRUE(y.gaps_intact());
        }
      }
    }
  }
}

TEST_F(SkinnyGemm, BitsDoNotDependOnTheOtherRows) {
  for (const Case& c : kCases) {
    const OnGpu w(gpu(), test::random_bf16("w", {c.outputs, c.channels}), kBF16);
    const OnGpu x(gpu(), test::random_bf16("x", {kernels::kSkinnyRows, c.channels}), kBF16);
    const OnGpu all(gpu(), kF32, {kernels::kSkinnyRows, c.outputs});
    ops::run(gpu(), ops::Linear{.y_TN = all, .x_TK = x, .w_NK = w});
    const std::vector<double> expected = all.values();
    for (const int64_t rows : kRows) {
      const int64_t first = kernels::kSkinnyRows - rows;  // in another place than among all
      const OnGpu y(gpu(), kF32, {rows, c.outputs});
      ops::run(gpu(), ops::Linear{.y_TN = y, .x_TK = x.tensor().row_range(first, rows), .w_NK = w});
      const std::vector<double> mine(expected.begin() + first * c.outputs, expected.end());
      EXPECT_EQ(y.values(), mine) << rows << " rows of " << c.channels << " channels";
    }
  }
}

// A product with the norm before it, SwiGLU after it, both and neither.
struct Around {
  bool norm, swiglu;
};
constexpr Around kAround[] = {{false, false}, {true, false}, {false, true}, {true, true}};
// Also outputs that end within a tile of eight gates.
constexpr Case kDecodeCases[] = {{1, 1, 0},       {16, 32, 0},     {40, 96, 8},    {37, 299, 1},
                                 {1604, 512, 8},  {4096, 1536, 0}, {340, 1024, 0}, {300, 2736, 3},
                                 {160, 14336, 0}, {3200, 4096, 8}};

TEST_F(SkinnyGemm, DecodeLinearMatchesTheCpu) {
  for (const Case& c : kDecodeCases) {
    const Owned norm = test::random_bf16("norm", {c.channels});
    const OnGpu norm_gpu(gpu(), norm, kBF16);
    for (const Around& around : kAround) {
      const Owned w = test::random_bf16("w", {(around.swiglu ? 2 : 1) * c.outputs, c.channels});
      const OnGpu w_gpu(gpu(), w, kBF16, c.gap);
      for (const int64_t rows : {1, 5, 8, 16, 33, 64}) {
        const Owned x = test::random_bf16("x", {rows, c.channels});
        const OnGpu x_gpu(gpu(), x, kBF16, c.gap);
        const Owned expected = test::poisoned({rows, c.outputs});
        const OnGpu y(gpu(), kBF16, {rows, c.outputs}, c.gap);
        ops::DecodeLinear op{.y_BN = expected,
                             .x_BK = x,
                             .w_NK = w,
                             .alpha = 0.02f,
                             .norm_K = around.norm ? norm.tensor() : Tensor(),
                             .norm_eps = 1e-2f,
                             .swiglu = around.swiglu};
        ops::run(cpu, op);
        op.y_BN = y;
        op.x_BK = x_gpu;
        op.w_NK = w_gpu;
        if (around.norm) op.norm_K = norm_gpu;
        ops::run(gpu(), op);
        EXPECT_LE(test::relative_error(y, expected),
                  (around.norm || around.swiglu ? 4 : 1) * test::kBf16Error)
            << rows << " rows, " << c.outputs << " outputs of " << c.channels
            << " channels, norm: " << around.norm << ", swiglu: " << around.swiglu;
        EXPECT_TRUE(y.gaps_intact());
      }
    }
  }
}

TEST_F(SkinnyGemm, DecodeLinearDoesNotDependOnTheOtherRows) {
  for (const Case& c : kDecodeCases) {
    const OnGpu norm(gpu(), test::random_bf16("norm", {c.channels}), kBF16);
    const OnGpu w(gpu(), test::random_bf16("w", {2 * c.outputs, c.channels}), kBF16);
    const OnGpu x(gpu(), test::random_bf16("x", {kernels::kSkinnyRows, c.channels}), kBF16);
    const auto of_rows = [&](int64_t rows) {
      const OnGpu y(gpu(), kF32, {rows, c.outputs});
      ops::run(gpu(),
               ops::DecodeLinear{.y_BN = y,
                                 .x_BK = x.tensor().row_range(kernels::kSkinnyRows - rows, rows),
                                 .w_NK = w,
                                 .alpha = 0.02f,
                                 .norm_K = norm,
                                 .norm_eps = 1e-2f,
                                 .swiglu = true});
      return y.values();
    };
    const std::vector<double> expected = of_rows(kernels::kSkinnyRows);
    for (const int64_t rows : kRows) {
      const std::vector<double> mine(expected.end() - rows * c.outputs, expected.end());
      EXPECT_EQ(of_rows(rows), mine) << rows << " rows of " << c.channels << " channels";
    }
  }
}

TEST_F(SkinnyGemm, ArgmaxOfTheLogits) {
  for (const int64_t vocab : {1, 5, 31, 1024, 5000}) {
    Owned x = test::random_normal("x", {7, vocab + 3});
    const auto at = [&](int64_t row, int64_t col) -> float& {
      return x.tensor().f32()[row * (vocab + 3) + col];
    };
    for (int64_t row = 0; row < 7; ++row) at(row, vocab) = 100;  // beyond those to look at
    at(1, vocab / 2) = at(1, vocab - 1) = 50;
    at(2, vocab / 2) = std::numeric_limits<float>::quiet_NaN();
    at(3, vocab - 1) = std::numeric_limits<float>::infinity();
    for (int64_t col = 0; col < vocab; ++col) at(4, col) = -7;
    for (int64_t col = 0; col < vocab; ++col) at(5, col) = -std::numeric_limits<float>::infinity();
    const Owned expected = test::integers(std::vector<int32_t>(7));
    const OnGpu y(gpu(), test::integers(std::vector<int32_t>(7, 9)), DType::kI32);
    ops::run(cpu, ops::Argmax{.y_B = expected, .x_BV = x, .vocab = vocab});
    ops::run(gpu(), ops::Argmax{.y_B = y, .x_BV = OnGpu(gpu(), x, kF32), .vocab = vocab});
    EXPECT_EQ(y.values(), test::to_f64(expected)) << vocab;
    EXPECT_EQ(expected.tensor().i32()[1], vocab / 2);
    EXPECT_EQ(expected.tensor().i32()[2], -1);
    EXPECT_EQ(expected.tensor().i32()[3], -1);
    EXPECT_EQ(expected.tensor().i32()[4], 0);
    EXPECT_EQ(expected.tensor().i32()[5], -1);
  }
}

}  // namespace
}  // namespace sbtrain::skinny_gemm_test
