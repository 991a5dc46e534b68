// Where the answers of a synthetic task stand.
#pragma once

#include <vector>

#include "data/batch.h"
#include "eval/attention_overlap.h"

namespace sbtrain {

// For every labelled token of one example of MQAR or MQRAR (data/task.h): the value behind the last
// occurrence of the same key before it. Of MQRAR's values of a key this is the current one.
// Throws ExitCode::kData where that is not the label.
std::vector<TruePosition> answer_positions(const PackedBatch& example);

}  // namespace sbtrain
