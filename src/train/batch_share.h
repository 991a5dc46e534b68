// How the ranks of a job share the sequences of a step: train.context_parallel of them together are
// one that takes sequences.
#pragma once

#include <cstdint>

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

// Which tokens of a micro-batch its ranks hold: ContextLayout::kAuto is folded where that shares
// keys more evenly by 5% at least.
ContextLayout context_layout(const TrainConfig& train);

// The most keys that one of the ranks reads, divided by the mean, with one document in a row and
// nothing skipped.
double context_balance(const TrainConfig& train, ContextLayout layout);

}  // namespace sbtrain
