// Rows of random tokens, for what is timed without text.
#pragma once

#include "data/batch.h"
#include "model/model_config.h"
#include "train/run_config.h"

namespace sbtrain {

// A micro-batch of rows of train.sequence_length tokens, each a document whose first `targets`
// tokens have a random token as their target (targets_of_row). Another `index` draws other tokens.
PackedBatch random_rows(const TrainConfig& train, const ModelConfig& model, int64_t targets,
                        int64_t index = 0);

}  // namespace sbtrain
