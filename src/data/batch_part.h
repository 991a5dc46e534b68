// A rank's part of a micro-batch that several ranks share.
#pragma once

#include <cstdint>
#include <vector>

#include "data/batch.h"

namespace sbtrain {

struct BatchPart {
  // Documents are cut at the ends of the part, and the targets and positions of its tokens are
  // those that they have in the whole: the last token's target may be the first token of the next
  // part.
  PackedBatch batch;
  std::vector<int32_t> cut_positions;  // of the tokens in the documents that are cut
  // The document that goes on from earlier parts, if there is one: its tokens here, which are the
  // first, and in earlier parts.
  int64_t continued = 0;
  int64_t earlier = 0;
};

// Part `place` of `parts` equal ones, tokens [place n, (place + 1) n). The number of parts divides
// that of the tokens.
BatchPart part_of(const PackedBatch& whole, int place, int parts);

}  // namespace sbtrain
