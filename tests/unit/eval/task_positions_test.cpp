// The positions of answers, against the structure of the tasks.
#include "eval/task_positions.h"

#include <gtest/gtest.h>

#include <map>

#include "core/error.h"
#include "data/packing.h"
#include "data/task.h"

namespace sbtrain {
namespace {

PackedBatch example(TaskKind type, int64_t pairs, int64_t vocab, int64_t length, int64_t index) {
  TaskConfig config;
  config.type = type;
  config.pairs = pairs;
  PackedBatch batch;
  clear(batch, length);
  Task(config, vocab, length, 11).append_example(batch, Task::Split::kHeldOut, index);
  return batch;
}

// The values of an example differ, so the answer is the position of the label's value.
TEST(AnswerPositions, OfMqarAreWhereTheLabelsStand) {
  for (int64_t n = 0; n < 20; ++n) {
    const PackedBatch batch = example(TaskKind::kMqar, 7, 64, 61, n);
    const std::vector<TruePosition> positions = answer_positions(batch);
    ASSERT_EQ(positions.size(), 7U);
    for (const auto& [query, key] : positions) {
      const int32_t label = batch.targets[static_cast<size_t>(query)];
      ASSERT_GE(label, 0);
      const auto stands = std::find(batch.tokens.begin(), batch.tokens.end(), label);
      EXPECT_EQ(key, stands - batch.tokens.begin());
      EXPECT_LT(key, 14);
    }
  }
}

// A table, updated pair by pair, holds the position where each key's value was last written.
TEST(AnswerPositions, OfMqrarAreWhereTheValueWasWrittenLast) {
  bool repeated = false;
  for (int64_t n = 0; n < 20; ++n) {
    constexpr int64_t kPairs = 5;
    const PackedBatch batch = example(TaskKind::kMqrar, kPairs, 24, 80, n);
    std::vector<TruePosition> expected;
    std::map<int32_t, int64_t> written;
    for (int64_t at = 0; at < 80; at += 2) {
      const int32_t key = batch.tokens[static_cast<size_t>(at)];
      if (at >= 2 * kPairs) {
        expected.push_back({.query = at, .key = written.at(key)});
        repeated |= written.at(key) >= 2 * kPairs;
      }
      written[key] = at + 1;
    }
    EXPECT_EQ(answer_positions(batch), expected);
  }
  EXPECT_TRUE(repeated) << "no key was asked for twice";
}

TEST(AnswerPositions, RefusesLabelsThatAreNotInTheText) {
  PackedBatch batch = example(TaskKind::kMqar, 3, 64, 32, 0);
  const auto at = static_cast<size_t>(answer_positions(batch).front().query);
  batch.targets[at] += 1;
  EXPECT_THROW(answer_positions(batch), Error);
  batch.targets[at] -= 1;
  batch.tokens[at] = 31;  // a key, or the first one again
  if (batch.tokens[0] == 31) batch.tokens[at] = 30;
  EXPECT_THROW(answer_positions(batch), Error);
}

}  // namespace
}  // namespace sbtrain
