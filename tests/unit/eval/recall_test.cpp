// AR and non-AR losses against a brute-force computation by their definition.
#include "eval/recall.h"

#include <gtest/gtest.h>

#include "support/model.h"

namespace sbtrain {
namespace {

struct Sums {
  double recalled = 0, other = 0;
  int64_t recalled_tokens = 0, other_tokens = 0;
  void add(bool is_recalled, double loss) {
    (is_recalled ? recalled : other) += loss;
    ++(is_recalled ? recalled_tokens : other_tokens);
  }
  void expect_equal(const RecallSplit& split) const {
    EXPECT_EQ(split.recalled.tokens, recalled_tokens);
    EXPECT_EQ(split.other.tokens, other_tokens);
    EXPECT_NEAR(split.recalled.loss_sum, recalled, 1e-9);
    EXPECT_NEAR(split.other.loss_sum, other, 1e-9);
    EXPECT_GT(recalled_tokens, 0);
    EXPECT_GT(other_tokens, 0);
  }
};

TEST(Recall, IsWhatTheContextHolds) {
  Recall recall;
  Sums token;
  Sums bigram;
  for (uint64_t index = 0; index < 3; ++index) {
    // The vocabulary is small, so that pairs repeat, also across documents, which must not count.
    const PackedBatch batch = test::packed_batch({40, 1, 25, 7}, 9, index);
    std::vector<float> losses(batch.tokens.size());
    for (size_t t = 0; t < losses.size(); ++t) losses[t] = 0.25f * static_cast<float>(t % 17);
    recall.add(batch, losses);
    for (size_t n = 0; n + 1 < batch.cu_seqlens.size(); ++n) {
      for (int32_t t = batch.cu_seqlens[n]; t < batch.cu_seqlens[n + 1]; ++t) {
        const int32_t target = batch.targets[t];
        if (target < 0) continue;
        bool has_token = false;
        bool has_bigram = false;
        for (int32_t i = batch.cu_seqlens[n]; i <= t; ++i) {
          has_token |= batch.tokens[i] == target;
          has_bigram |=
              i < t && batch.tokens[i] == batch.tokens[t] && batch.tokens[i + 1] == target;
        }
        token.add(has_token, losses[t]);
        bigram.add(has_bigram, losses[t]);
      }
    }
  }
  token.expect_equal(recall.token);
  bigram.expect_equal(recall.bigram);
}

TEST(Recall, OfASmallExample) {
  PackedBatch batch;
  batch.tokens = {1, 2, 3, 1, 2};
  batch.targets = {2, 3, 1, 2, 4};
  batch.positions = {0, 1, 2, 3, 4};
  batch.cu_seqlens = {0, 5};
  Recall recall;
  recall.add(batch, std::vector<float>{1, 2, 4, 8, 16});
  EXPECT_EQ(recall.token.recalled.loss_sum, 4 + 8);  // 1 and 2 stood there before
  EXPECT_EQ(recall.bigram.recalled.loss_sum, 8);     // 1 2 stood there before
  EXPECT_EQ(recall.bigram.other.loss_sum, 1 + 2 + 4 + 16);
}

}  // namespace
}  // namespace sbtrain
