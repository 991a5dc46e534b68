// The part of sbtrain eval that measures what a cache loses that drops keys by their gates.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cli/options.h"
#include "data/batch.h"
#include "eval/perplexity.h"
#include "serve/inference.h"

namespace sbtrain {

struct CacheEvalOptions {
  std::vector<double> drop_below;  // one row of results each
  double share = 1;

  // To be called when the command has its other options, of which --drop-below excludes many.
  void add(Command command);
  bool asked() const { return !drop_below.empty(); }
  KeyDropping dropping(double below) const { return {.below = below, .share = share}; }
};

// Sums over windows that were continued token by token from their first one.
struct CacheScore {
  Perplexity total;
  int64_t windows = 0;
  int64_t seen = 0;  // keys of their tokens, over the layers with gates and their heads
  int64_t kept = 0;
  int64_t bytes = 0;    // that they take in the end
  double seconds = 0;   // of the decode steps
  int64_t stepped = 0;  // tokens in them
  void visit(const auto& f) {
    total.visit(f);
    f(windows);
    f(seen);
    f(kept);
    f(bytes);
    f(seconds);
    f(stepped);
  }
};

// How many windows of `length` tokens can be continued together: 64, or fewer where `room` bytes do
// not hold them, weights included, but one at least. `plan` becomes what takes most.
int64_t slots_for_windows(const ModelConfig& config, Backend backend,
                          const CacheEvalOptions& options, int64_t length, size_t room,
                          MemoryReport& plan);

// Scores documents of `batch` of `length` tokens each, all of them at once.
CacheScore score_decoded(InferenceModel& model, const PackedBatch& batch, int64_t documents,
                         int64_t length, const KeyDropping& dropping);

}  // namespace sbtrain
