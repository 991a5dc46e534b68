// A rank's parameters as the ranges of logical tensors that checkpoints store.
#pragma once

#include <vector>

#include "parallel/sharded_params.h"
#include "parallel/tensor_range.h"

namespace sbtrain {

// Every part that this rank owns, in the registry's order; with_state adds the state of
// the optimizer.
std::vector<TensorShard> tensor_shards(const ShardedParams& params, bool with_state);

// The n-th of `parts` parts of that, of nearly equal sizes.
std::vector<TensorShard> tensor_shards(const ShardedParams& params, bool with_state, int n,
                                       int parts);

}  // namespace sbtrain
