// Where the elements of a range lie in memory whose rows are padded.
#pragma once

#include <algorithm>
#include <cstdint>

#include "parallel/tensor_range.h"

namespace sbtrain {

// Calls visit(logical, stored, count) for runs of elements that are neighbours in memory and cover
// the logical flat elements [from, to) of the shard's range: `logical` counts from `from`, and
// `stored` from the start of the shard's memory.
template <typename Visit>
void for_each_stored_run(const TensorShard& shard, int64_t from, int64_t to, Visit&& visit) {
  const int64_t cols = shard.shape.empty() ? 1 : shard.shape.back();
  if (shard.row_stride == 0 || shard.row_stride == cols) {
    if (from < to) visit(int64_t{0}, from - shard.begin, to - from);
    return;
  }
  for (int64_t at = from; at < to;) {
    const int64_t count = std::min((at / cols + 1) * cols, to) - at;
    const int64_t padding = (at / cols - shard.begin / cols) * (shard.row_stride - cols);
    visit(at - from, at - shard.begin + padding, count);
    at += count;
  }
}

}  // namespace sbtrain
