// Checks and scratch of attention to the keys of other ranks.
#include "ops/far_keys.h"

namespace sbtrain::ops {
namespace {

template <typename Op>
void check_far(const Check& c, const Op& op) {
  const int64_t tokens = op.q_THd.rows();
  const int64_t d = c.heads("q_THd", op.q_THd, tokens, op.params.heads);
  c.matrix("k_THd", op.k_THd, tokens, op.k_THd.cols(), op.q_THd.dtype);
  const int64_t width = op.k_THd.cols();
  c.that(width > 0 && width % d == 0 && op.q_THd.cols() % width == 0,
         "the heads of keys divide those of the queries");
  c.same("v_THd", op.v_THd, op.k_THd);
  c.that(
      op.far.queries >= 0 && op.far.queries <= tokens && op.far.keys >= 0 && op.far.keys <= tokens,
      "queries and keys are some of the tokens");
  if constexpr (requires { op.o_THd; }) {
    c.matrix("o_THd", op.o_THd, tokens, op.q_THd.cols(), DType::kF32);
  } else {
    c.same("do_THd", op.do_THd, op.q_THd);
    c.matrix("dq_THd", op.dq_THd, tokens, op.q_THd.cols(), DType::kF32);
    c.matrix("dk_THd", op.dk_THd, tokens, width, DType::kF32);
    c.same("dv_THd", op.dv_THd, op.dk_THd);
  }
}

template <typename Op>
void check_sticks(const Check& c, const Op& op) {
  check_far(c, op);
  const int64_t tokens = op.q_THd.rows();
  c.matrix("before_HT", op.before_HT, op.params.heads, tokens);
  c.matrix("stop_HT", op.stop_HT, op.params.heads, tokens, DType::kI32);
  c.that(op.params.remainder == Remainder::kNone, "nothing receives the remainder");
}

}  // namespace

void StickBreakingFarForward::check() const {
  const Check c(kName);
  check_sticks(c, *this);
  c.matrix("log2_rem_HT", log2_rem_HT, params.heads, q_THd.rows());
}

void StickBreakingFarBackward::check() const {
  const Check c(kName);
  check_sticks(c, *this);
  c.matrix("w_HT", w_HT, params.heads, q_THd.rows());
}

Buffer StickBreakingFarForward::scratch(const Stream& s) const {
  return cpu::scratch(s, *this);
}

Buffer StickBreakingFarBackward::scratch(const Stream& s) const {
  return cpu::scratch(s, *this);
}

}  // namespace sbtrain::ops
