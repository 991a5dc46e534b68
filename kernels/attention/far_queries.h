// The parts in which the backward pass over far keys is computed (scratch_sizes.h).
#pragma once

#include <algorithm>

#include "kernels/attention/stickbreaking.h"

namespace sbtrain::kernels {

// Calls run(part, first head, heads) for as many heads and queries as the workspace has room for,
// one after the other, so that sums of keys have one order. Nothing where there is no query or key.
template <typename Run>
void for_each_part_of_far_queries(StickBreakingProblem p, const Run& run) {
  if (p.far.key == p.tokens) return;
  const int queries = p.far.queries;
  for (int head = 0; head < p.heads; head += p.workspace_heads) {
    const int heads = std::min(p.heads - head, p.workspace_heads);
    for (int first = 0; first < queries; first += p.workspace_tokens) {
      p.far.first_query = first;
      p.far.queries = std::min(queries, first + p.workspace_tokens);
      run(p, head, heads);
    }
    p.far.queries = queries;
  }
}

}  // namespace sbtrain::kernels
