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

double context_balance(const TrainConfig& train, ContextLayout layout, const TokenCost& cost) {
  const auto ranks = static_cast<int>(train.context_parallel);
  const int64_t chunks = chunks_of_rank(layout) * train.context_parallel;
  const int64_t tokens = train.micro_batch * train.sequence_length / chunks;
  const int64_t samples = std::min<int64_t>(tokens, 1024);
  double most = 0, all = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    double work = 0;
    for (const int64_t place : places_of(layout, rank, ranks)) {
      for (int64_t n = 0; n < samples; ++n) {
        const int64_t token = place * tokens + (2 * n + 1) * tokens / (2 * samples);
        work += cost(static_cast<double>(token % train.sequence_length));
      }
    }
    most = std::max(most, work);
    all += work;
  }
  return all > 0 ? most * ranks / all : 1.0;
}

ContextLayout context_layout(const TrainConfig& train, const TokenCost& cost) {
  if (train.context_layout != ContextLayout::kAuto) return train.context_layout;
  constexpr double kGain = 1.05;
  if (train.micro_batch * train.sequence_length % (2 * train.context_parallel) != 0) {
    return ContextLayout::kConsecutive;
  }
  const bool better = context_balance(train, ContextLayout::kConsecutive, cost) >=
                      kGain * context_balance(train, ContextLayout::kFolded, cost);
  return better ? ContextLayout::kFolded : ContextLayout::kConsecutive;
}

}  // namespace sbtrain
