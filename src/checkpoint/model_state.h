// Moves sharded parameters out of checkpoints.
#pragma once

#include <vector>

#include "checkpoint/checkpoint.h"
#include "parallel/sharded_params.h"

namespace sbtrain {

// Fills this rank's ranges of all weights and, if with_moments is set, of AdamW's moments. Throws
// ExitCode::kNoCheckpoint naming the first tensor that is missing or has another shape.
void load_params(const CheckpointReader& checkpoint, ShardedParams& params, bool with_moments);

// The same without the refresh() that shows the new weights in a step, which is for all ranks
// together: the caller does that once it knows that no rank has refused the checkpoint.
void load_shards(const CheckpointReader& checkpoint, ShardedParams& params, bool with_moments);

// Throws ExitCode::kNoCheckpoint, saying what to do instead, for a checkpoint with weights alone.
void check_resumable(const CheckpointReader& checkpoint);

}  // namespace sbtrain
