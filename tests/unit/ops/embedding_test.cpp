#include "ops/embedding.h"

#include <gtest/gtest.h>

#include "core/error.h"
#include "support/tensors.h"

namespace sbtrain {
namespace {

using test::CpuStream;
using test::Owned;

struct Shape {
  int64_t tokens, width;
  int32_t vocab;
};
constexpr Shape kShapes[] = {{1, 1, 1}, {9, 5, 7}, {64, 33, 10}, {700, 130, 50}};

TEST(Embedding, ScalesTheRowOfEachToken) {
  CpuStream s;
  for (const auto& [tokens, width, vocab] : kShapes) {
    const Owned ids = test::random_integers("ids", tokens, vocab);
    const Owned w = test::random_normal("w", {vocab, width});
    const Owned y = test::poisoned({tokens, width}, 3);
    ops::run(s, ops::Embedding{.y_TD = y, .tokens_T = ids, .w_VD = w, .scale = 12.0f});
    std::vector<double> expected;
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t i = 0; i < width; ++i)
        expected.push_back(12.0 * w.f32()[ids.i32()[t] * width + i]);
    }
    EXPECT_LE(test::relative_error(y, expected), 1e-7);
    EXPECT_TRUE(y.gaps_intact());
  }
}

TEST(EmbeddingBackward, AddsEveryOccurrence) {
  CpuStream s;
  for (const auto& [tokens, width, vocab] : kShapes) {
    const Owned ids = test::random_integers("ids", tokens, vocab);
    const Owned dy = test::random_normal("dy", {tokens, width}, 1, 0, 2);
    const Owned dw = test::random_normal("dw", {vocab, width});
    std::vector<double> expected = test::to_f64(dw);
    const std::vector<double> gradient = test::to_f64(dy);
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t i = 0; i < width; ++i) {
        expected[static_cast<size_t>(ids.i32()[t] * width + i)] +=
            0.5 * gradient[static_cast<size_t>(t * width + i)];
      }
    }
    const Owned again(dw);
    ops::run(s, ops::EmbeddingBackward{.dw_VD = dw, .dy_TD = dy, .tokens_T = ids, .scale = 0.5f});
    EXPECT_LE(test::relative_error(dw, expected), 1e-6);
    ops::run(s,
             ops::EmbeddingBackward{.dw_VD = again, .dy_TD = dy, .tokens_T = ids, .scale = 0.5f});
    EXPECT_TRUE(test::bitwise_equal(again, dw));
  }
}

TEST(Embedding, TokensOutsideTheVocabularyAreRefused) {
  CpuStream s;
  const Owned w = test::constant({4, 2}, 1);
  const Owned y = test::poisoned({2, 2});
  EXPECT_THROW(
      ops::run(
          s,
          ops::Embedding{.y_TD = y, .tokens_T = test::integers({0, 4}), .w_VD = w, .scale = 1.0f}),
      Error);
  EXPECT_THROW(
      ops::run(s,
               ops::EmbeddingBackward{
                   .dw_VD = w, .dy_TD = y, .tokens_T = test::integers({-1, 0}), .scale = 1.0f}),
      Error);
}

}  // namespace
}  // namespace sbtrain
