// One packed micro-batch on the host.
#pragma once

#include <cstdint>
#include <vector>

namespace sbtrain {

struct PackedBatch {
  std::vector<int32_t> tokens;      // [T]
  std::vector<int32_t> targets;     // [T], the next token; -1 is ignored
  std::vector<int32_t> positions;   // [T], from 0 in each document
  std::vector<int32_t> cu_seqlens;  // [documents + 1], from 0 to T
  int64_t valid_targets = 0;        // targets that are not -1
};

// How well a model predicts a batch.
struct BatchScore {
  double loss_sum = 0;  // nats, summed over the valid targets
  double hits = 0;      // valid targets that the model held most likely
};

}  // namespace sbtrain
