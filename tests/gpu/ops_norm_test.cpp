#include <gtest/gtest.h>

#include <cmath>
#include <iterator>
#include <vector>

#include "gpu/op_test.h"
#include "ops/norm.h"

namespace sbtrain::norm_test {
namespace {

using test::OnGpu;
using test::Owned;
using Norm = test::GpuOpTest;

constexpr DType kF32 = DType::kF32;
constexpr DType kBF16 = DType::kBF16;
constexpr float kEps = 1e-5f;

TEST_F(Norm, RmsNormMatchesTheCpu) {
  for (const test::RowCase& c : test::kRowCases) {
    const Owned x = test::random_bf16("x", {c.tokens, c.width}, 3, 1);
    const Owned w = test::random_bf16("w", {c.width}, 0.2, 1);
    const Owned expected = test::poisoned({c.tokens, c.width});
    ops::run(cpu, ops::RmsNorm{.y_TD = expected, .x_TD = x, .w_D = w, .eps = kEps});
    const OnGpu y(gpu(), kBF16, {c.tokens, c.width}, c.gap);
    ops::run(gpu(), ops::RmsNorm{.y_TD = y,
                                 .x_TD = OnGpu(gpu(), x, kBF16, c.gap),
                                 .w_D = OnGpu(gpu(), w, kBF16),
                                 .eps = kEps});
    EXPECT_LE(test::relative_error(y, expected), test::kBf16Error) << c.tokens << " x " << c.width;
    EXPECT_TRUE(y.gaps_intact());
  }
}

TEST_F(Norm, RmsNormBackwardMatchesTheCpuAndRepeats) {
  for (const test::RowCase& c : test::kRowCases) {
    const Owned x = test::random_bf16("x", {c.tokens, c.width}, 1, 0.5);
    const Owned w = test::random_bf16("w", {c.width}, 0.2, 1);
    const Owned dy = test::random_bf16("dy", {c.tokens, c.width});
    const Owned dx = test::random_bf16("dx", {c.tokens, c.width});
    const Owned dw = test::random_bf16("dw", {c.width});
    const OnGpu x_gpu(gpu(), x, kBF16, c.gap);
    const OnGpu w_gpu(gpu(), w, kBF16);
    const OnGpu dy_gpu(gpu(), dy, kBF16, c.gap);
    const OnGpu dx1(gpu(), dx, kBF16, c.gap);
    const OnGpu dw1(gpu(), dw, kF32);
    const OnGpu dx2(gpu(), dx, kBF16, c.gap);
    const OnGpu dw2(gpu(), dw, kF32);
    ops::run(
        gpu(),
        ops::RmsNormBackward{
            .dx_TD = dx1, .dw_D = dw1, .dy_TD = dy_gpu, .x_TD = x_gpu, .w_D = w_gpu, .eps = kEps});
    ops::run(
        gpu(),
        ops::RmsNormBackward{
            .dx_TD = dx2, .dw_D = dw2, .dy_TD = dy_gpu, .x_TD = x_gpu, .w_D = w_gpu, .eps = kEps});
    const OnGpu zero(gpu(), test::constant({c.width}, 0), kF32);
    const OnGpu fresh(gpu(), test::constant({c.width}, NAN), kF32);
    for (const OnGpu* sums : {&zero, &fresh}) {
      ops::run(gpu(), ops::RmsNormBackward{.dx_TD = OnGpu(gpu(), dx, kBF16, c.gap),
                                           .dw_D = *sums,
                                           .dy_TD = dy_gpu,
                                           .x_TD = x_gpu,
                                           .w_D = w_gpu,
                                           .eps = kEps,
                                           .accumulate_dw = sums == &zero});
    }
    EXPECT_EQ(zero.raw(), fresh.raw());
    ops::run(cpu, ops::RmsNormBackward{
                      .dx_TD = dx, .dw_D = dw, .dy_TD = dy, .x_TD = x, .w_D = w, .eps = kEps});
    EXPECT_LE(test::relative_error(dx1, dx), test::kBf16Error) << c.tokens << " x " << c.width;
    EXPECT_LE(test::relative_error(dw1, dw), test::kF32Error) << c.tokens << " x " << c.width;
    EXPECT_TRUE(dx1.gaps_intact());
    EXPECT_EQ(dx1.raw(), dx2.raw());
    EXPECT_EQ(dw1.raw(), dw2.raw());
  }
}

struct HeadCase {
  int64_t tokens;
  int heads;
  int64_t head_dim, gap;
};
constexpr HeadCase kHeadCases[] = {{1, 1, 3, 0},     {35, 3, 5, 1},     {200, 8, 32, 0},
                                   {900, 24, 64, 0}, {70, 24, 64, 8},   {70, 3, 64, 3},
                                   {300, 5, 96, 0},  {300, 12, 128, 0}, {40, 70, 64, 0},
                                   {41, 3, 256, 8},  {10, 2, 250, 0},   {10, 1, 512, 0}};

TEST_F(Norm, HeadNormMatchesTheCpu) {
  for (const HeadCase& c : kHeadCases) {
    const int64_t cols = c.heads * c.head_dim;
    const Owned x = test::random_bf16("x", {c.tokens, cols}, 2, 1);
    const Owned w = test::random_bf16("w", {cols}, 0.2, 1);
    const Owned b = test::random_bf16("b", {cols});
    const Owned expected = test::poisoned({c.tokens, cols});
    ops::run(
        cpu,
        ops::HeadNorm{
            .y_THd = expected, .x_THd = x, .w_Hd = w, .b_Hd = b, .heads = c.heads, .eps = kEps});
    const OnGpu y(gpu(), kBF16, {c.tokens, cols}, c.gap);
    ops::run(gpu(), ops::HeadNorm{.y_THd = y,
                                  .x_THd = OnGpu(gpu(), x, kBF16, c.gap),
                                  .w_Hd = OnGpu(gpu(), w, kBF16),
                                  .b_Hd = OnGpu(gpu(), b, kBF16),
                                  .heads = c.heads,
                                  .eps = kEps});
    EXPECT_LE(test::relative_error(y, expected), test::kBf16Error)
        << c.heads << " heads of " << c.head_dim;
    EXPECT_TRUE(y.gaps_intact());
  }
}

TEST_F(Norm, HeadNormBackwardMatchesTheCpuAndRepeats) {
  for (const HeadCase& c : kHeadCases) {
    const int64_t cols = c.heads * c.head_dim;
    const Owned x = test::random_bf16("x", {c.tokens, cols}, 1, 0.5);
    const Owned w = test::random_bf16("w", {cols}, 0.2, 1);
    const Owned dy = test::random_bf16("dy", {c.tokens, cols});
    const Owned dx = test::poisoned({c.tokens, cols});
    const Owned dw = test::random_bf16("dw", {cols});
    const Owned db = test::random_bf16("db", {cols});
    const OnGpu x_gpu(gpu(), x, kBF16, c.gap);
    const OnGpu w_gpu(gpu(), w, kBF16);
    const OnGpu dy_gpu(gpu(), dy, kBF16, c.gap);
    const OnGpu dx1(gpu(), kBF16, {c.tokens, cols}, c.gap);
    const OnGpu dx2(gpu(), kBF16, {c.tokens, cols}, c.gap);
    const OnGpu dw1(gpu(), dw, kF32);
    const OnGpu dw2(gpu(), dw, kF32);
    const OnGpu db1(gpu(), db, kF32);
    const OnGpu db2(gpu(), db, kF32);
    ops::run(gpu(), ops::HeadNormBackward{.dx_THd = dx1,
                                          .dw_Hd = dw1,
                                          .db_Hd = db1,
                                          .dy_THd = dy_gpu,
                                          .x_THd = x_gpu,
                                          .w_Hd = w_gpu,
                                          .heads = c.heads,
                                          .eps = kEps});
    ops::run(gpu(), ops::HeadNormBackward{.dx_THd = dx2,
                                          .dw_Hd = dw2,
                                          .db_Hd = db2,
                                          .dy_THd = dy_gpu,
                                          .x_THd = x_gpu,
                                          .w_Hd = w_gpu,
                                          .heads = c.heads,
                                          .eps = kEps});
    ops::run(cpu, ops::HeadNormBackward{.dx_THd = dx,
                                        .dw_Hd = dw,
                                        .db_Hd = db,
                                        .dy_THd = dy,
                                        .x_THd = x,
                                        .w_Hd = w,
                                        .heads = c.heads,
                                        .eps = kEps});
    EXPECT_LE(test::relative_error(dx1, dx), test::kBf16Error)
        << c.heads << " heads of " << c.head_dim;
    EXPECT_LE(test::relative_error(dw1, dw), test::kF32Error);
    EXPECT_LE(test::relative_error(db1, db), test::kF32Error);
    EXPECT_TRUE(dx1.gaps_intact());
    EXPECT_EQ(dx1.raw(), dx2.raw());
    EXPECT_EQ(dw1.raw(), dw2.raw());
    EXPECT_EQ(db1.raw(), db2.raw());
  }
}

// One head may be as wide as a row: the joint norm of queries or keys.
std::vector<HeadCase> rms_cases() {
  std::vector<HeadCase> cases(std::begin(kHeadCases), std::end(kHeadCases));
  for (const HeadCase& c : {HeadCase{7, 1, 300, 1},
                            {35, 1, 520, 8},
                            {300, 1, 1024, 16},
                            {41, 1, 1536, 0},
                            {70, 1, 2048, 1024},
                            {9, 1, 2050, 3},
                            {300, 1, 4096, 8192},
                            {5, 1, 16384, 0}}) {
    cases.push_back(c);
  }
  return cases;
}

TEST_F(Norm, HeadRmsNormMatchesTheCpu) {
  for (const HeadCase& c : rms_cases()) {
    const int64_t cols = c.heads * c.head_dim;
    const Owned x = test::random_bf16("x", {c.tokens, cols}, 2, 1);
    const Owned w = test::random_bf16("w", {c.head_dim}, 0.2, 1);
    const Owned expected = test::poisoned({c.tokens, cols});
    ops::run(cpu, ops::HeadRmsNorm{
                      .y_THd = expected, .x_THd = x, .w_d = w, .heads = c.heads, .eps = kEps});
    const OnGpu y(gpu(), kBF16, {c.tokens, cols}, c.gap);
    ops::run(gpu(), ops::HeadRmsNorm{.y_THd = y,
                                     .x_THd = OnGpu(gpu(), x, kBF16, c.gap),
                                     .w_d = OnGpu(gpu(), w, kBF16),
                                     .heads = c.heads,
                                     .eps = kEps});
    EXPECT_LE(test::relative_error(y, expected), test::kBf16Error)
        << c.heads << " heads of " << c.head_dim;
    EXPECT_TRUE(y.gaps_intact());
  }
}

// The second time in place.
TEST_F(Norm, HeadRmsNormBackwardMatchesTheCpuAndRepeats) {
  for (const HeadCase& c : rms_cases()) {
    const int64_t cols = c.heads * c.head_dim;
    const Owned x = test::random_bf16("x", {c.tokens, cols}, 1, 0.5);
    const Owned w = test::random_bf16("w", {c.head_dim}, 0.2, 1);
    const Owned dy = test::random_bf16("dy", {c.tokens, cols});
    const Owned dx = test::poisoned({c.tokens, cols});
    const Owned dw = test::random_bf16("dw", {c.head_dim});
    const OnGpu x_gpu(gpu(), x, kBF16, c.gap);
    const OnGpu w_gpu(gpu(), w, kBF16);
    const OnGpu dy_gpu(gpu(), dy, kBF16, c.gap);
    const OnGpu dx1(gpu(), kBF16, {c.tokens, cols}, c.gap);
    const OnGpu dw1(gpu(), dw, kF32);
    const OnGpu dw2(gpu(), dw, kF32);
    ops::HeadRmsNormBackward op{.dx_THd = dx1,
                                .dw_d = dw1,
                                .dy_THd = dy_gpu,
                                .x_THd = x_gpu,
                                .w_d = w_gpu,
                                .heads = c.heads,
                                .eps = kEps};
    ops::run(gpu(), op);
    op.dx_THd = dy_gpu;
    op.dw_d = dw2;
    ops::run(gpu(), op);
    ops::run(cpu, ops::HeadRmsNormBackward{.dx_THd = dx,
                                           .dw_d = dw,
                                           .dy_THd = dy,
                                           .x_THd = x,
                                           .w_d = w,
                                           .heads = c.heads,
                                           .eps = kEps});
    EXPECT_LE(test::relative_error(dx1, dx), test::kBf16Error)
        << c.heads << " heads of " << c.head_dim;
    EXPECT_LE(test::relative_error(dw1, dw), test::kF32Error);
    EXPECT_TRUE(dx1.gaps_intact());
    EXPECT_EQ(dx1.raw(), dy_gpu.raw());
    EXPECT_EQ(dw1.raw(), dw2.raw());
  }
}

TEST_F(Norm, LayerNormMatchesTheCpu) {
  for (const test::RowCase& c : test::kRowCases) {
    const Owned x = test::random_bf16("x", {c.tokens, c.width}, 3, 1);
    const Owned w = test::random_bf16("w", {c.width}, 0.2, 1);
    const Owned b = test::random_bf16("b", {c.width});
    const Owned expected = test::poisoned({c.tokens, c.width});
    ops::run(cpu, ops::LayerNorm{.y_TD = expected, .x_TD = x, .w_D = w, .b_D = b, .eps = kEps});
    const OnGpu y(gpu(), kBF16, {c.tokens, c.width}, c.gap);
    ops::run(gpu(), ops::LayerNorm{.y_TD = y,
                                   .x_TD = OnGpu(gpu(), x, kBF16, c.gap),
                                   .w_D = OnGpu(gpu(), w, kBF16),
                                   .b_D = OnGpu(gpu(), b, kBF16),
                                   .eps = kEps});
    EXPECT_LE(test::relative_error(y, expected), test::kBf16Error) << c.tokens << " x " << c.width;
    EXPECT_TRUE(y.gaps_intact());
  }
}

// dx is written to another tensor, added to it, or written in place of dy.
TEST_F(Norm, LayerNormBackwardMatchesTheCpuAndRepeats) {
  for (const test::RowCase& c : test::kRowCases) {
    if (c.width == 1) continue;  // the gradient is 0, up to rounding
    for (const bool accumulate : {false, true}) {
      SCOPED_TRACE(std::to_string(c.tokens) + " x " + std::to_string(c.width));
      const Owned x = test::random_bf16("x", {c.tokens, c.width}, 1, 0.5);
      const Owned w = test::random_bf16("w", {c.width}, 0.2, 1);
      const Owned dy = test::random_bf16("dy", {c.tokens, c.width});
      const Owned dx = test::random_bf16("dx", {c.tokens, c.width});
      const Owned dw = test::random_bf16("dw", {c.width});
      const Owned db = test::random_bf16("db", {c.width});
      const OnGpu x_gpu(gpu(), x, kBF16, c.gap);
      const OnGpu w_gpu(gpu(), w, kBF16);
      const OnGpu dy_gpu(gpu(), dy, kBF16, c.gap);
      const OnGpu dx1(gpu(), accumulate ? dx : dy, kBF16, c.gap);
      const OnGpu dx2(gpu(), accumulate ? dx : dy, kBF16, c.gap);
      const OnGpu dw1(gpu(), dw, kF32), db1(gpu(), db, kF32);
      const OnGpu dw2(gpu(), dw, kF32), db2(gpu(), db, kF32);
      ops::run(gpu(), ops::LayerNormBackward{.dx_TD = dx1,
                                             .dw_D = dw1,
                                             .db_D = db1,
                                             .dy_TD = dy_gpu,
                                             .x_TD = x_gpu,
                                             .w_D = w_gpu,
                                             .eps = kEps,
                                             .accumulate = accumulate});
      ops::run(gpu(), ops::LayerNormBackward{.dx_TD = dx2,
                                             .dw_D = dw2,
                                             .db_D = db2,
                                             .dy_TD = accumulate ? dy_gpu.tensor() : dx2.tensor(),
                                             .x_TD = x_gpu,
                                             .w_D = w_gpu,
                                             .eps = kEps,
                                             .accumulate = accumulate});
      ops::run(cpu, ops::LayerNormBackward{.dx_TD = dx,
                                           .dw_D = dw,
                                           .db_D = db,
                                           .dy_TD = dy,
                                           .x_TD = x,
                                           .w_D = w,
                                           .eps = kEps,
                                           .accumulate = accumulate});
      EXPECT_LE(test::relative_error(dx1, dx), test::kBf16Error);
      EXPECT_LE(test::relative_error(dw1, dw), test::kF32Error);
      EXPECT_LE(test::relative_error(db1, db), test::kF32Error);
      EXPECT_TRUE(dx1.gaps_intact());
      EXPECT_EQ(dx1.raw(), dx2.raw());
      EXPECT_EQ(dw1.raw(), dw2.raw());
      EXPECT_EQ(db1.raw(), db2.raw());
    }
  }
}

}  // namespace
}  // namespace sbtrain::norm_test
