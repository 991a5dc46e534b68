// The positions of the answers in a synthetic task.
#pragma once

#include <vector>

#include "data/batch.h"
#include "eval/attention_overlap.h"

namespace sbtrain {

// For every labelled token of one example of MQAR or MQRAR (data/task.h): the position of the value
// after the last earlier occurrence of the same key. In MQRAR this is the key's current value.
// Throws ExitCode::kData if that value is not the label.
std::vector<TruePosition> answer_positions(const PackedBatch& example);

}  // namespace sbtrain
