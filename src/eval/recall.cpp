#include "eval/recall.h"

#include <unordered_set>

#include "core/error.h"

namespace sbtrain {
namespace {

void add_to(RecallSplit& split, bool recalled, float loss) {
  Perplexity& part = recalled ? split.recalled : split.other;
  part.loss_sum += loss;
  ++part.tokens;
}

uint64_t side_by_side(int32_t first, int32_t second) {
  return static_cast<uint64_t>(static_cast<uint32_t>(first)) << 32 | static_cast<uint32_t>(second);
}

}  // namespace

void Recall::add(const PackedBatch& batch, std::span<const float> losses_T) {
  require(losses_T.size() == batch.targets.size(), "{} losses of {} tokens", losses_T.size(),
          batch.targets.size());
  std::unordered_set<int32_t> tokens;
  std::unordered_set<uint64_t> bigrams;
  for (size_t t = 0; t < batch.tokens.size(); ++t) {
    if (batch.positions[t] == 0) {
      tokens.clear();
      bigrams.clear();
    } else {
      bigrams.insert(side_by_side(batch.tokens[t - 1], batch.tokens[t]));
    }
    tokens.insert(batch.tokens[t]);
    const int32_t target = batch.targets[t];
    if (target < 0) continue;
    add_to(token, tokens.contains(target), losses_T[t]);
    add_to(bigram, bigrams.contains(side_by_side(batch.tokens[t], target)), losses_T[t]);
  }
}

}  // namespace sbtrain
