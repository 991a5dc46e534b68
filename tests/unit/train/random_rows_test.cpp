#include "train/random_rows.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace sbtrain {
namespace {

// Matrix products are told apart by what they give on such rows (TrainStep::tune). Where tokens
// have no gradient, products that add them up in different orders are the same in every bit.
TEST(RandomRows, HaveTargetsInAllTheirParts) {
  TrainConfig train;
  train.sequence_length = 48;
  train.micro_batch = 2;
  ModelConfig model;
  model.vocab = 19;
  for (const int64_t targets : {1, 5, 12, 47, 48}) {
    SCOPED_TRACE(targets);
    const PackedBatch batch = random_rows(train, model, targets);
    EXPECT_EQ(batch.valid_targets, 2 * targets);
    ASSERT_EQ(batch.targets.size(), 2u * 48u);
    EXPECT_EQ(std::ranges::count_if(batch.targets, [](int32_t t) { return t >= 0; }), 2 * targets);
    const int64_t stretch = (48 + targets - 1) / targets;
    for (int64_t row = 0; row < 2; ++row) {
      const auto begin = batch.targets.begin() + row * 48;
      EXPECT_GE(begin[47], 0) << "the last token";
      for (int64_t at = 0; at + stretch <= 48; ++at) {
        EXPECT_TRUE(std::any_of(begin + at, begin + at + stretch, [](int32_t t) { return t >= 0; }))
            << "tokens " << at << " to " << at + stretch;
      }
    }
  }
}

}  // namespace
}  // namespace sbtrain
