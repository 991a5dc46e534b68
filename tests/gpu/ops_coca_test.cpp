#include <gtest/gtest.h>

#include "gpu/op_test.h"
#include "ops/coca.h"

namespace sbtrain::coca_test {
namespace {

using test::OnGpu;
using test::Owned;
using Coca = test::GpuOpTest;

constexpr DType kBF16 = DType::kBF16;

struct Case {
  int64_t tokens;
  int heads;
  int64_t head_dim, gap;
};
constexpr Case kCases[] = {{1, 1, 2, 0},     {7, 3, 6, 1},    {67, 5, 64, 0},  {67, 5, 64, 3},
                           {300, 24, 64, 8}, {33, 4, 128, 0}, {33, 2, 96, 16}, {9, 3, 256, 0}};

// Compares y of both backends and checks that nothing is written outside of it.
void expect_equal(const OnGpu& actual, const Owned& expected, const char* what, const Case& c,
                  ops::CocaVariant variant) {
  EXPECT_LE(test::relative_error(actual, expected), test::kBf16Error)
      << what << ", variant " << static_cast<int>(variant) << ", " << c.heads << " heads of "
      << c.head_dim << ", gap " << c.gap;
  EXPECT_TRUE(actual.gaps_intact()) << what;
}

TEST_F(Coca, MatchesTheCpu) {
  for (const Case& c : kCases) {
    const int64_t cols = c.heads * c.head_dim;
    const Owned positions = test::random_integers("positions", c.tokens, 100000);
    const OnGpu positions_gpu(gpu(), positions, DType::kI32);
    const Owned x = test::random_bf16("x", {c.tokens, cols});
    const Owned dy = test::random_bf16("dy", {c.tokens, cols});
    const OnGpu x_gpu(gpu(), x, kBF16, c.gap), dy_gpu(gpu(), dy, kBF16, c.gap);
    for (const auto variant : {ops::CocaVariant::kOfficial, ops::CocaVariant::kStrict}) {
      const ops::CocaParams params = {
          .rope = {.heads = c.heads, .frequencies = ops::rope_frequencies(20000, c.head_dim)},
          .variant = variant};
      const Owned y = test::poisoned({c.tokens, cols});
      const OnGpu query(gpu(), kBF16, {c.tokens, cols}, c.gap);
      ops::run(gpu(),
               ops::CocaQuery{
                   .y_THd = query, .q_THd = x_gpu, .positions_T = positions_gpu, .params = params});
      ops::run(cpu,
               ops::CocaQuery{.y_THd = y, .q_THd = x, .positions_T = positions, .params = params});
      expect_equal(query, y, "query", c, variant);

      const OnGpu dquery(gpu(), kBF16, {c.tokens, cols}, c.gap);
      ops::run(gpu(), ops::CocaQueryBackward{.dq_THd = dquery,
                                             .dy_THd = dy_gpu,
                                             .q_THd = x_gpu,
                                             .positions_T = positions_gpu,
                                             .params = params});
      ops::run(
          cpu,
          ops::CocaQueryBackward{
              .dq_THd = y, .dy_THd = dy, .q_THd = x, .positions_T = positions, .params = params});
      expect_equal(dquery, y, "query backward", c, variant);

      const OnGpu key(gpu(), kBF16, {c.tokens, cols}, c.gap);
      ops::run(gpu(),
               ops::CocaKey{
                   .y_THd = key, .t_THd = x_gpu, .positions_T = positions_gpu, .params = params});
      ops::run(cpu,
               ops::CocaKey{.y_THd = y, .t_THd = x, .positions_T = positions, .params = params});
      expect_equal(key, y, "key", c, variant);

      const Owned dx = test::poisoned({c.tokens, cols});
      Owned rounded = y;
      test::round_to_bf16(rounded);
      const OnGpu rounded_gpu(gpu(), rounded, kBF16, c.gap);
      const OnGpu dkey(gpu(), kBF16, {c.tokens, cols}, c.gap);
      ops::run(gpu(), ops::CocaKeyBackward{.dt_THd = dkey,
                                           .dy_THd = dy_gpu,
                                           .y_THd = rounded_gpu,
                                           .positions_T = positions_gpu,
                                           .params = params});
      ops::run(cpu, ops::CocaKeyBackward{.dt_THd = dx,
                                         .dy_THd = dy,
                                         .y_THd = rounded,
                                         .positions_T = positions,
                                         .params = params});
      expect_equal(dkey, dx, "key backward", c, variant);
    }
  }
}

// Calls the ops as the module does: on columns of one matrix, with outputs in place of inputs.
TEST_F(Coca, InPlaceOnColumns) {
  constexpr int64_t kTokens = 40, kWidth = 128;
  const Owned positions = test::random_integers("positions", kTokens, 5000);
  const OnGpu positions_gpu(gpu(), positions, DType::kI32);
  for (const auto variant : {ops::CocaVariant::kOfficial, ops::CocaVariant::kStrict}) {
    const ops::CocaParams params = {
        .rope = {.heads = 2, .frequencies = ops::rope_frequencies(10000, kWidth / 2)},
        .variant = variant};
    const Owned x = test::random_bf16("x", {kTokens, 3 * kWidth});
    const Owned saved = test::random_bf16("saved", {kTokens, kWidth});
    const OnGpu y(gpu(), x, kBF16);
    const OnGpu saved_gpu(gpu(), saved, kBF16);
    const auto run = [&](Stream& s, const Tensor& all, const Tensor& of, const Tensor& at) {
      const Tensor first = all.col_range(0, kWidth);
      const Tensor second = all.col_range(kWidth, kWidth);
      ops::run(s,
               ops::CocaQuery{.y_THd = first, .q_THd = first, .positions_T = at, .params = params});
      ops::run(s, ops::CocaQueryBackward{.dq_THd = second,
                                         .dy_THd = second,
                                         .q_THd = of,
                                         .positions_T = at,
                                         .params = params});
    };
    run(gpu(), y, saved_gpu, positions_gpu);
    run(cpu, x, saved, positions);
    EXPECT_LE(test::relative_error(y, x), test::kBf16Error);

    const Owned t = test::random_bf16("t", {kTokens, 2 * kWidth});
    const OnGpu t_gpu(gpu(), t, kBF16);
    const auto run_keys = [&](Stream& s, const Tensor& all, const Tensor& of, const Tensor& at) {
      const Tensor first = all.col_range(0, kWidth);
      const Tensor second = all.col_range(kWidth, kWidth);
      ops::run(s,
               ops::CocaKey{.y_THd = first, .t_THd = first, .positions_T = at, .params = params});
      ops::run(s, ops::CocaKeyBackward{.dt_THd = second,
                                       .dy_THd = second,
                                       .y_THd = of,
                                       .positions_T = at,
                                       .params = params});
    };
    run_keys(gpu(), t_gpu, saved_gpu, positions_gpu);
    run_keys(cpu, t, saved, positions);
    EXPECT_LE(test::relative_error(t_gpu, t), test::kBf16Error);
  }
}

// Rows of texts of different lengths, as in a decode step with dynamic_ntk.
TEST_F(Coca, RowsOfTheirOwnLengths) {
  for (const Case& c : kCases) {
    if (c.head_dim < 4) continue;
    const int64_t cols = c.heads * c.head_dim;
    const Owned positions = test::random_integers("positions", c.tokens, 100000);
    const Owned lengths = test::random_integers("lengths", c.tokens, 100000);
    const OnGpu positions_gpu(gpu(), positions, DType::kI32);
    const OnGpu lengths_gpu(gpu(), lengths, DType::kI32);
    const Owned x = test::random_bf16("x", {c.tokens, cols});
    const OnGpu x_gpu(gpu(), x, kBF16, c.gap);
    for (const auto variant : {ops::CocaVariant::kOfficial, ops::CocaVariant::kStrict}) {
      const ops::CocaParams params = {
          .rope = {.heads = c.heads,
                   .frequencies = ops::rope_frequencies(20000, c.head_dim),
                   .dynamic = {.base = 20000, .factor = 2.5, .train_length = 30000}},
          .variant = variant};
      const Owned y = test::poisoned({c.tokens, cols});
      const OnGpu query(gpu(), kBF16, {c.tokens, cols}, c.gap);
      ops::run(gpu(), ops::CocaQuery{.y_THd = query,
                                     .q_THd = x_gpu,
                                     .positions_T = positions_gpu,
                                     .params = params,
                                     .lengths_T = lengths_gpu});
      ops::run(cpu, ops::CocaQuery{.y_THd = y,
                                   .q_THd = x,
                                   .positions_T = positions,
                                   .params = params,
                                   .lengths_T = lengths});
      expect_equal(query, y, "query", c, variant);
      const OnGpu key(gpu(), kBF16, {c.tokens, cols}, c.gap);
      ops::run(gpu(), ops::CocaKey{.y_THd = key,
                                   .t_THd = x_gpu,
                                   .positions_T = positions_gpu,
                                   .params = params,
                                   .lengths_T = lengths_gpu});
      ops::run(cpu, ops::CocaKey{.y_THd = y,
                                 .t_THd = x,
                                 .positions_T = positions,
                                 .params = params,
                                 .lengths_T = lengths});
      expect_equal(key, y, "key", c, variant);
    }
  }
}

}  // namespace
}  // namespace sbtrain::coca_test
