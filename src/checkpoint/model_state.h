// Moves sharded parameters out of checkpoints.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "parallel/sharded_params.h"

namespace sbtrain {

// Fills this rank's ranges of all weights and, if with_state is set, of the optimizer's state and
// of the average of the weights. Throws ExitCode::kNoCheckpoint naming the first tensor that is
// missing or has another shape.
void load_params(const CheckpointReader& checkpoint, ShardedParams& params, bool with_state);

// Whose state a checkpoint holds.
enum class StateFrom : uint8_t { kTheOptimizer, kAnotherOptimizer };

// The same without the refresh() that shows the new weights in a step, which is for all ranks
// together: the caller does that once it knows that no rank has refused the checkpoint. Returns the
// kinds of state of which something was not in the checkpoint, and begins anew: with zeros where
// another optimizer saved it, and the average of weights with the weights.
std::set<std::string> load_shards(const CheckpointReader& checkpoint, ShardedParams& params,
                                  bool with_state, StateFrom from = StateFrom::kTheOptimizer);

// Throws ExitCode::kNoCheckpoint, saying what to do instead, for a checkpoint with weights alone.
void check_resumable(const CheckpointReader& checkpoint);

}  // namespace sbtrain
