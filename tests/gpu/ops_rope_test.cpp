#include <gtest/gtest.h>

#include "gpu/op_test.h"
#include "ops/rope.h"

namespace sbtrain::rope_test {
namespace {

using test::OnGpu;
using test::Owned;
using Rope = test::GpuOpTest;

struct Case {
  int64_t tokens;
  int heads;
  int64_t head_dim, gap;
  int64_t rotated = 0;  // channels of a head that turn; 0: all
  int64_t turned() const { return rotated > 0 ? rotated : head_dim; }
};
constexpr Case kCases[] = {{1, 1, 2, 0},       {7, 3, 6, 1},       {67, 5, 64, 0},
                           {67, 5, 64, 3},     {300, 24, 64, 8},   {33, 4, 128, 0},
                           {33, 2, 96, 16},    {9, 3, 256, 0},     {67, 5, 64, 0, 16},
                           {67, 5, 64, 3, 16}, {33, 4, 96, 0, 24}, {300, 24, 128, 8, 32},
                           {7, 3, 7, 1, 4},    {9, 3, 20, 0, 16},  {9, 2, 512, 0, 256}};

// Includes late positions, whose angles need more precision than f32.
TEST_F(Rope, MatchesTheCpu) {
  for (const Case& c : kCases) {
    const int64_t cols = c.heads * c.head_dim;
    const Owned positions = test::random_integers("positions", c.tokens, 1000000);
    for (const bool inverse : {false, true}) {
      const Owned x = test::random_bf16("x", {c.tokens, cols});
      const OnGpu y(gpu(), x, DType::kBF16, c.gap);
      const ops::RopeParams params = {.heads = c.heads,
                                      .frequencies = ops::rope_frequencies(10000, c.turned()),
                                      .inverse = inverse,
                                      .rotated = c.rotated};
      ops::run(gpu(), ops::Rope{.x_THd = y,
                                .positions_T = OnGpu(gpu(), positions, DType::kI32),
                                .params = params});
      ops::run(cpu, ops::Rope{.x_THd = x, .positions_T = positions, .params = params});
      EXPECT_LE(test::relative_error(y, x), test::kBf16Error)
          << c.heads << " heads of " << c.head_dim;
      EXPECT_TRUE(y.gaps_intact());
    }
  }
}

// Rows of texts of different lengths, some below the trained length, turn by frequencies of their
// own.
TEST_F(Rope, RowsOfTheirOwnLengths) {
  for (const Case& c : kCases) {
    if (c.turned() < 4) continue;
    const int64_t cols = c.heads * c.head_dim;
    const Owned positions = test::random_integers("positions", c.tokens, 100000);
    const Owned lengths = test::random_integers("lengths", c.tokens, 100000);
    const Owned x = test::random_bf16("x", {c.tokens, cols});
    const OnGpu y(gpu(), x, DType::kBF16, c.gap);
    const ops::RopeParams params = {
        .heads = c.heads,
        .frequencies = ops::rope_frequencies(10000, c.turned()),
        .rotated = c.rotated,
        .dynamic = {.base = 10000, .factor = 2.5, .train_length = 30000}};
    ops::run(gpu(), ops::Rope{.x_THd = y,
                              .positions_T = OnGpu(gpu(), positions, DType::kI32),
                              .params = params,
                              .lengths_T = OnGpu(gpu(), lengths, DType::kI32)});
    ops::run(
        cpu,
        ops::Rope{.x_THd = x, .positions_T = positions, .params = params, .lengths_T = lengths});
    EXPECT_LE(test::relative_error(y, x), test::kBf16Error)
        << c.heads << " heads of " << c.head_dim;
    EXPECT_TRUE(y.gaps_intact());
  }
}

// q and k are column ranges of one qkv matrix; v does not change.
TEST_F(Rope, ColumnRanges) {
  const Owned x = test::random_bf16("x", {40, 3 * 128});
  const Owned positions = test::random_integers("positions", 40, 5000);
  const OnGpu y(gpu(), x, DType::kBF16);
  const OnGpu positions_gpu(gpu(), positions, DType::kI32);
  const ops::RopeParams params = {.heads = 2, .frequencies = ops::rope_frequencies(10000, 64)};
  for (const int64_t first : {0, 128}) {
    ops::run(gpu(), ops::Rope{.x_THd = y.tensor().col_range(first, 128),
                              .positions_T = positions_gpu,
                              .params = params});
    ops::run(cpu, ops::Rope{.x_THd = x.tensor().col_range(first, 128),
                            .positions_T = positions,
                            .params = params});
  }
  EXPECT_LE(test::relative_error(y, x), test::kBf16Error);
}

}  // namespace
}  // namespace sbtrain::rope_test
