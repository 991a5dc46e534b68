// Checks that attention within a pack and attention to the keys of other ranks share.
#pragma once

#include "ops/attention.h"

namespace sbtrain::ops {

// q_THd, k_THd and v_THd of an op: as many keys as queries, whose heads divide those of the
// queries.
template <typename Op>
void check_queries_and_keys(const Check& c, const Op& op) {
  const int64_t tokens = op.q_THd.rows();
  const int64_t d = c.heads("q_THd", op.q_THd, tokens, op.params.heads);
  c.matrix("k_THd", op.k_THd, tokens, op.k_THd.cols(), op.q_THd.dtype);
  const int64_t width = op.k_THd.cols();
  c.that(width > 0 && width % d == 0 && op.q_THd.cols() % width == 0,
         "the heads of keys divide those of the queries");
  c.same("v_THd", op.v_THd, op.k_THd);
}

}  // namespace sbtrain::ops
