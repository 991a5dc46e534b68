#include <gtest/gtest.h>

#include "gpu/op_test.h"
#include "ops/heads.h"

namespace sbtrain {
namespace {

using test::OnGpu;
using test::Owned;
using Heads = test::GpuOpTest;

constexpr DType kBF16 = DType::kBF16;

struct Case {
  int64_t tokens;
  int heads, groups, head_dim;
  int64_t gap;
};
constexpr Case kCases[] = {{1, 1, 1, 8, 0},     {35, 6, 2, 5, 3},    {300, 8, 8, 64, 0},
                           {300, 8, 4, 64, 8},  {300, 8, 2, 64, 0},  {300, 8, 1, 128, 16},
                           {1000, 32, 4, 4, 0}, {70, 14, 2, 256, 0}, {70, 14, 2, 64, 3}};

TEST_F(Heads, RepeatMatchesTheCpu) {
  for (const Case& c : kCases) {
    const Owned x = test::random_bf16("x", {c.tokens, c.groups * c.head_dim});
    const Owned expected = test::poisoned({c.tokens, c.heads * c.head_dim});
    ops::run(cpu, ops::RepeatHeads{.y_THd = expected, .x_TGd = x, .head_dim = c.head_dim});
    const OnGpu y(gpu(), kBF16, {c.tokens, c.heads * c.head_dim}, c.gap);
    ops::run(gpu(),
             ops::RepeatHeads{
                 .y_THd = y, .x_TGd = OnGpu(gpu(), x, kBF16, c.gap), .head_dim = c.head_dim});
    EXPECT_EQ(y.values(), test::to_f64(expected)) << c.heads << " heads, " << c.groups;
    EXPECT_TRUE(y.gaps_intact());
  }
}

TEST_F(Heads, RepeatBackwardMatchesTheCpuAndRepeats) {
  for (const Case& c : kCases) {
    const Owned dy = test::random_bf16("dy", {c.tokens, c.heads * c.head_dim});
    const Owned expected = test::poisoned({c.tokens, c.groups * c.head_dim});
    ops::run(cpu,
             ops::RepeatHeadsBackward{.dx_TGd = expected, .dy_THd = dy, .head_dim = c.head_dim});
    const OnGpu dy_gpu(gpu(), dy, kBF16, c.gap);
    const OnGpu dx1(gpu(), kBF16, {c.tokens, c.groups * c.head_dim}, c.gap);
    const OnGpu dx2(gpu(), kBF16, {c.tokens, c.groups * c.head_dim}, c.gap);
    for (const OnGpu* dx : {&dx1, &dx2}) {
      ops::run(gpu(),
               ops::RepeatHeadsBackward{.dx_TGd = *dx, .dy_THd = dy_gpu, .head_dim = c.head_dim});
    }
    EXPECT_LE(test::relative_error(dx1, expected), test::kBf16Error)
        << c.heads << " heads, " << c.groups;
    EXPECT_TRUE(dx1.gaps_intact());
    EXPECT_EQ(dx1.raw(), dx2.raw());
  }
}

}  // namespace
}  // namespace sbtrain
