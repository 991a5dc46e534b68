#include "train/batch_share.h"

#include <algorithm>

#include "core/error.h"

namespace sbtrain {

int64_t largest_micro_batch(const TrainConfig& train, int64_t ranks) {
  if (train.batch % ranks != 0) return 0;
  const int64_t share = train.batch / ranks;
  int64_t size = std::min(train.micro_batch, share);
  while (share % size != 0) --size;
  return size;
}

int most_ranks(const TrainConfig& train, int limit) {
  int ranks = limit;
  while (ranks > 1 && largest_micro_batch(train, ranks) != train.micro_batch) --ranks;
  return ranks;
}

void check_batch(const TrainConfig& train, int64_t ranks) {
  const int64_t possible = largest_micro_batch(train, ranks);
  if (possible == train.micro_batch) return;
  const std::string smaller =
      possible > 0 ? fmt::format("train.micro_batch: {}, or ", possible) : std::string();
  fail(ExitCode::kConfig,
       "train.batch: {} sequences cannot be shared by {} ranks in micro-batches of {}; set {}"
       "train.batch to a multiple of {}",
       train.batch, ranks, train.micro_batch, smaller, ranks * train.micro_batch);
}

}  // namespace sbtrain
