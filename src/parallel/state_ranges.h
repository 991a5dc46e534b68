// What of a shard keeps the same state of an optimizer, has the same learning rate, and is updated
// as one range.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/params.h"
#include "optim/optimizer.h"

namespace sbtrain {

// Elements [begin, begin + size) of a shard. Flat ranges hold any number of tensors, and the gaps
// between them; a tensor that the optimizer takes as a matrix has a range of its own.
struct StateRange {
  int64_t begin = 0, size = 0;
  const PlacedTensor* matrix = nullptr;   // null: a flat range
  std::vector<std::string> names;         // of the states
  std::vector<Tensor> states{};           // f32 [size], in that order
  std::vector<ops::DecayRange> decays{};  // elements with weight decay, from `begin` on
  float lr_factor = 1;                    // of its tensors
  int64_t end() const { return begin + size; }
};

// The ranges of the shard that holds elements [begin, begin + size) of the unit, in their order and
// without memory for the states. Padding behind a last matrix belongs to none.
std::vector<StateRange> state_ranges(const ParamUnit& unit, const Optimizer& optimizer,
                                     int64_t begin, int64_t size);

}  // namespace sbtrain
