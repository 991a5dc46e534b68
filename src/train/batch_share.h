// How the ranks of a job share the sequences of a step: train.context_parallel of them together are
// one that takes sequences.
#pragma once

#include <cstdint>
#include <functional>

#include "train/run_config.h"

namespace sbtrain {

// The largest micro-batch, train.micro_batch at most, with which `ranks` ranks can share
// train.batch evenly. 0 if none can, since they do not divide it, or are no multiple of
// train.context_parallel.
int64_t largest_micro_batch(const TrainConfig& train, int64_t ranks);

// The most ranks, `limit` at most, that can share train.batch in micro-batches of
// train.micro_batch.
int most_ranks(const TrainConfig& train, int limit);

// Throws ExitCode::kConfig, with what would do instead, unless `ranks` ranks can.
void check_batch(const TrainConfig& train, int64_t ranks);

// What a token costs that sees so many keys: Transformer::flops_per_token.
using TokenCost = std::function<double(double keys)>;

// Which tokens of a micro-batch its ranks hold: ContextLayout::kAuto is folded where that shares
// the work more evenly by 5% at least.
ContextLayout context_layout(const TrainConfig& train, const TokenCost& cost);

// The work of the rank that has the most, divided by the mean, with one document in a row and no
// key skipped. Chunks of more than 1024 tokens are sampled.
double context_balance(const TrainConfig& train, ContextLayout layout, const TokenCost& cost);

}  // namespace sbtrain
