#include <gtest/gtest.h>

#include "gpu/op_test.h"
#include "ops/embedding.h"

namespace sbtrain::embedding_test {
namespace {

using test::OnGpu;
using test::Owned;
using Embedding = test::GpuOpTest;
using Values = std::vector<double>;

struct Case {
  int64_t tokens, width;
  int32_t vocab;
  int64_t gap;
};
// A vocabulary of 1 gives one run of equal tokens over all chunks of the sort; a small vocabulary
// gives runs that begin and end anywhere in a chunk.
constexpr Case kCases[] = {{1, 3, 5, 0},      {31, 8, 1, 0},         {32, 64, 2, 8},
                           {33, 17, 3, 1},    {1000, 200, 1, 0},     {1000, 72, 7, 8},
                           {4096, 40, 50, 0}, {5001, 1536, 1000, 0}, {300, 2304, 49152, 16}};

TEST_F(Embedding, MatchesTheCpu) {
  for (const Case& c : kCases) {
    const Owned ids = test::random_integers("ids", c.tokens, c.vocab);
    const Owned w = test::random_bf16("w", {c.vocab, c.width});
    const Owned expected = test::poisoned({c.tokens, c.width});
    ops::run(cpu, ops::Embedding{.y_TD = expected, .tokens_T = ids, .w_VD = w, .scale = 0.3f});
    const OnGpu y(gpu(), DType::kBF16, {c.tokens, c.width}, c.gap);
    ops::run(gpu(), ops::Embedding{.y_TD = y,
                                   .tokens_T = OnGpu(gpu(), ids, DType::kI32),
                                   .w_VD = OnGpu(gpu(), w, DType::kBF16, c.gap),
                                   .scale = 0.3f});
    EXPECT_LE(test::relative_error(y, expected), test::kBf16Error);
    EXPECT_TRUE(y.gaps_intact());
  }
}

TEST_F(Embedding, GradientMatchesFp64AndRepeats) {
  for (const Case& c : kCases) {
    const Owned ids = test::random_integers("ids", c.tokens, c.vocab);
    const Owned dy = test::random_bf16("dy", {c.tokens, c.width});
    const Owned before = test::random_bf16("dw", {c.vocab, c.width});
    Values expected = test::to_f64(before);
    for (int64_t t = 0; t < c.tokens; ++t) {
      for (int64_t i = 0; i < c.width; ++i) {
        expected[static_cast<size_t>(ids.i32()[t] * c.width + i)] +=
            0.25 * static_cast<double>(dy.f32()[t * c.width + i]);
      }
    }
    const OnGpu ids_gpu(gpu(), ids, DType::kI32);
    const OnGpu dy_gpu(gpu(), dy, DType::kBF16, c.gap);
    std::vector<uint8_t> first;
    for (int run = 0; run < 3; ++run) {
      const OnGpu dw(gpu(), before, DType::kF32, c.gap);
      ops::run(gpu(), ops::EmbeddingBackward{
                          .dw_VD = dw, .dy_TD = dy_gpu, .tokens_T = ids_gpu, .scale = 0.25f});
      EXPECT_LE(test::relative_error(dw, expected), test::kF32Error)
          << c.tokens << " tokens of " << c.vocab << ", width " << c.width;
      EXPECT_TRUE(dw.gaps_intact());
      if (run == 0) first = dw.raw();
      EXPECT_EQ(dw.raw(), first);
    }
  }
}

}  // namespace
}  // namespace sbtrain::embedding_test
