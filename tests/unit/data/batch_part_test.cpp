// A rank's part of a micro-batch: targets and positions of the whole, documents cut at its ends.
#include "data/batch_part.h"

#include <gtest/gtest.h>

#include <numeric>

#include "core/error.h"

namespace sbtrain {
namespace {

// Twelve tokens: documents of 2, 7 and 3.
PackedBatch batch() {
  PackedBatch whole{.tokens = std::vector<int32_t>(12),
                    .targets = {1, -1, 3, 4, 5, 6, 7, 8, -1, 10, 11, -1},
                    .positions = {0, 1, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2},
                    .cu_seqlens = {0, 2, 9, 12},
                    .valid_targets = 9};
  std::iota(whole.tokens.begin(), whole.tokens.end(), 0);
  return whole;
}

using Values = std::vector<int32_t>;

TEST(BatchPart, KeepsTargetsAndPositionsAndCutsDocuments) {
  const BatchPart part = part_of(batch(), 1, 3);
  EXPECT_EQ(part.batch.tokens, (Values{4, 5, 6, 7}));
  EXPECT_EQ(part.batch.targets, (Values{5, 6, 7, 8}));  // the last is the next part's first token
  EXPECT_EQ(part.batch.positions, (Values{2, 3, 4, 5}));
  EXPECT_EQ(part.cut_positions, (Values{0, 1, 2, 3}));
  EXPECT_EQ(part.batch.cu_seqlens, (Values{0, 4}));
  EXPECT_EQ(part.batch.valid_targets, 4);
  EXPECT_EQ(part.continued, 4);
  EXPECT_EQ(part.earlier, 2);
}

TEST(BatchPart, KnowsTheDocumentThatGoesOnFromSeveralParts) {
  const BatchPart first = part_of(batch(), 0, 6);  // exactly a document
  EXPECT_EQ(first.batch.cu_seqlens, (Values{0, 2}));
  EXPECT_EQ(first.continued, 0);
  const BatchPart second = part_of(batch(), 1, 6);  // begins with one
  EXPECT_EQ(second.continued, 0);
  EXPECT_EQ(second.earlier, 0);
  const BatchPart fifth = part_of(batch(), 4, 6);
  EXPECT_EQ(fifth.batch.cu_seqlens, (Values{0, 1, 2}));
  EXPECT_EQ(fifth.continued, 1);
  EXPECT_EQ(fifth.earlier, 6);
}

TEST(BatchPart, PartsTogetherAreTheWhole) {
  for (const int parts : {1, 2, 3, 4, 6, 12}) {
    Values tokens;
    int64_t valid = 0;
    for (int place = 0; place < parts; ++place) {
      const BatchPart part = part_of(batch(), place, parts);
      tokens.insert(tokens.end(), part.batch.tokens.begin(), part.batch.tokens.end());
      valid += part.batch.valid_targets;
      EXPECT_EQ(part.batch.cu_seqlens.back(), 12 / parts);
    }
    EXPECT_EQ(tokens, batch().tokens);
    EXPECT_EQ(valid, batch().valid_targets);
  }
}

TEST(BatchPart, UnequalPartsAreRefused) {
  EXPECT_THROW(part_of(batch(), 0, 5), Error);
  EXPECT_THROW(part_of(batch(), 3, 3), Error);
}

}  // namespace
}  // namespace sbtrain
