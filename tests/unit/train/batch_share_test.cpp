#include "train/batch_share.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "core/error.h"

namespace sbtrain {
namespace {

TrainConfig sequences(int64_t batch, int64_t micro_batch) {
  TrainConfig train;
  train.batch = batch;
  train.micro_batch = micro_batch;
  return train;
}

std::string refusal(const TrainConfig& train, int64_t ranks) {
  try {
    check_batch(train, ranks);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kConfig);
    return error.what();
  }
  return "";
}

TEST(BatchShare, AllGpusThatCanShareTheBatchTakePart) {
  EXPECT_EQ(most_ranks(sequences(1024, 4), 8), 8);
  EXPECT_EQ(most_ranks(sequences(1024, 4), 7), 4);
  EXPECT_EQ(most_ranks(sequences(128, 64), 8), 2);
  EXPECT_EQ(most_ranks(sequences(4, 4), 8), 1);
  EXPECT_EQ(most_ranks(sequences(4, 4), 1), 1);
}

TEST(BatchShare, TheLargestMicroBatchDividesTheShareOfARank) {
  EXPECT_EQ(largest_micro_batch(sequences(1024, 4), 64), 4);
  EXPECT_EQ(largest_micro_batch(sequences(1024, 4), 512), 2);
  EXPECT_EQ(largest_micro_batch(sequences(1024, 4), 1024), 1);
  EXPECT_EQ(largest_micro_batch(sequences(36, 4), 2), 3);
  EXPECT_EQ(largest_micro_batch(sequences(1024, 4), 12), 0);
  EXPECT_EQ(largest_micro_batch(sequences(4, 4), 8), 0);
}

TEST(BatchShare, RefusalsSayWhatWouldDo) {
  EXPECT_EQ(refusal(sequences(1024, 4), 256), "");
  EXPECT_EQ(refusal(sequences(1024, 4), 1024),
            "train.batch: 1024 sequences cannot be shared by 1024 ranks in micro-batches of 4; set "
            "train.micro_batch: 1, or train.batch to a multiple of 4096");
  EXPECT_EQ(refusal(sequences(1024, 4), 12),
            "train.batch: 1024 sequences cannot be shared by 12 ranks in micro-batches of 4; set "
            "train.batch to a multiple of 48");
}

TEST(BatchShare, RanksThatShareSequencesCountAsOne) {
  TrainConfig train = sequences(4, 2);
  train.context_parallel = 4;
  EXPECT_EQ(largest_micro_batch(train, 8), 2);
  EXPECT_EQ(most_ranks(train, 16), 8);
  EXPECT_EQ(most_ranks(train, 7), 4);
  EXPECT_EQ(refusal(train, 8), "");
  EXPECT_EQ(
      refusal(train, 6),
      "train.context_parallel: 4 ranks share a sequence, but 6 ranks are no multiple of that");
  EXPECT_EQ(refusal(train, 16),
            "train.batch: 4 sequences cannot be shared by 4 groups of ranks in micro-batches of 2; "
            "set train.micro_batch: 1, or train.batch to a multiple of 8");
}

// Of N consecutive parts of one row, the last reads 2 - 1/N times the keys of the mean.
TEST(BatchShare, FoldedPartsShareTheWorkOfARowEvenly) {
  const TokenCost keys = [](double n) { return n; };
  TrainConfig train = sequences(1, 1);
  train.sequence_length = 4096;
  for (const int64_t ranks : {2, 4, 8}) {
    train.context_parallel = ranks;
    const double n = static_cast<double>(ranks);
    EXPECT_NEAR(context_balance(train, ContextLayout::kConsecutive, keys), 2 - 1 / n, 1e-3);
    EXPECT_NEAR(context_balance(train, ContextLayout::kFolded, keys), 1, 1e-3);
    EXPECT_EQ(context_layout(train, keys), ContextLayout::kFolded);
  }
  // Where what keys cost hardly counts, or there is a window, there is nothing to gain.
  EXPECT_EQ(context_layout(train, [](double n) { return 1e6 + n; }), ContextLayout::kConsecutive);
  EXPECT_EQ(context_layout(train, [](double n) { return std::min(n, 8.0); }),
            ContextLayout::kConsecutive);
  // Ranks that hold whole rows share them evenly as it is, and odd numbers of tokens do not fold.
  train = sequences(4, 4);
  train.context_parallel = 2;
  EXPECT_EQ(context_layout(train, keys), ContextLayout::kConsecutive);
  train.context_layout = ContextLayout::kFolded;
  EXPECT_EQ(context_layout(train, keys), ContextLayout::kFolded);
  train = sequences(1, 1);
  train.sequence_length = 99;
  train.context_parallel = 3;
  EXPECT_EQ(context_layout(train, keys), ContextLayout::kConsecutive);
}

}  // namespace
}  // namespace sbtrain
