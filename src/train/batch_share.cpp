#include "train/batch_share.h"

#include <algorithm>

#include "core/error.h"

namespace sbtrain {

int64_t largest_micro_batch(const TrainConfig& train, int64_t ranks) {
  if (ranks % train.context_parallel != 0) return 0;
  const int64_t takers = ranks / train.context_parallel;
  if (train.batch % takers != 0) return 0;
  const int64_t share = train.batch / takers;
  int64_t size = std::min(train.micro_batch, share);
  while (share % size != 0) --size;
  return size;
}

int most_ranks(const TrainConfig& train, int limit) {
  int ranks = limit;
  while (ranks > train.context_parallel && largest_micro_batch(train, ranks) != train.micro_batch)
    --ranks;
  return ranks;
}

void check_batch(const TrainConfig& train, int64_t ranks) {
  const int64_t possible = largest_micro_batch(train, ranks);
  if (possible == train.micro_batch) return;
  if (ranks % train.context_parallel != 0) {
    fail(ExitCode::kConfig,
         "train.context_parallel: {} ranks share a sequence, but {} rank{} no multiple of that",
         train.context_parallel, ranks, ranks == 1 ? " is" : "s are");
  }
  const int64_t takers = ranks / train.context_parallel;
  const std::string smaller =
      possible > 0 ? fmt::format("train.micro_batch: {}, or ", possible) : std::string();
  fail(ExitCode::kConfig,
       "train.batch: {} sequences cannot be shared by {} {} in micro-batches of {}; set {}"
       "train.batch to a multiple of {}",
       train.batch, takers, train.context_parallel == 1 ? "ranks" : "groups of ranks",
       train.micro_batch, smaller, takers * train.micro_batch);
}

}  // namespace sbtrain
