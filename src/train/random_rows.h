// Rows of random tokens, for what is timed without text.
#pragma once

#include "data/batch.h"
#include "model/model_config.h"
#include "train/run_config.h"

namespace sbtrain {

// A micro-batch of rows of train.sequence_length tokens, each a document of which `targets` tokens
// have a random token as their target (targets_of_row). These are spread evenly and the last token
// is one of them, so that gradients reach all tokens: with parts of a row that have none, matrix
// products that add up tokens in different orders would give the same bits (ops/cuda/gemm_tuner.h).
// Another `index` draws other tokens.
PackedBatch random_rows(const TrainConfig& train, const ModelConfig& model, int64_t targets,
                        int64_t index = 0);

}  // namespace sbtrain
