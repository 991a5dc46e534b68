// Checks of attention to the keys of other ranks.
#include "ops/far_keys.h"

#include "ops/attention_checks.h"
#include "ops/far_softmax.h"
#include "ops/scratch.h"

namespace sbtrain::ops {
namespace {

template <typename Op>
void check_far(const Check& c, const Op& op) {
  check_queries_and_keys(c, op);
  const int64_t tokens = op.q_THd.rows();
  c.that(
      op.far.queries >= 0 && op.far.queries <= tokens && op.far.keys >= 0 && op.far.keys <= tokens,
      "queries and keys are some of the tokens");
  if constexpr (!requires { op.dq_THd; }) {
    c.matrix("o_THd", op.o_THd, tokens, op.q_THd.cols(), DType::kF32);
  } else {
    c.same("do_THd", op.do_THd, op.q_THd);
    c.matrix("dq_THd", op.dq_THd, tokens, op.q_THd.cols(), DType::kF32);
    c.matrix("dk_THd", op.dk_THd, tokens, op.k_THd.cols(), DType::kF32);
    c.same("dv_THd", op.dv_THd, op.dk_THd);
  }
}

template <typename Op>
void check_sticks(const Check& c, const Op& op) {
  check_far(c, op);
  const int64_t tokens = op.q_THd.rows();
  c.matrix("before_HT", op.before_HT, op.params.heads, tokens, DType::kF32);
  c.matrix("log2_rem_HT", op.log2_rem_HT, op.params.heads, tokens, DType::kF32);
  c.matrix("stop_HT", op.stop_HT, op.params.heads, tokens, DType::kI32);
  c.that(op.params.remainder == Remainder::kNone, "nothing receives the remainder");
  if (!op.gate_TH.defined()) return;
  c.matrix("gate_TH", op.gate_TH, tokens, op.params.heads, DType::kF32);
  if constexpr (requires { op.dgate_TH; }) c.same("dgate_TH", op.dgate_TH, op.gate_TH);
}

// Who receives the remainder of do_THd or o_THd, and how many channels a head has.
template <typename Op>
void check_receiver(const Check& c, const Op& op, const Tensor& x_THd) {
  const int64_t d = c.heads("heads", x_THd, x_THd.rows(), op.params.heads);
  c.that(op.params.remainder != Remainder::kNone, "something receives the remainder");
  if (op.params.remainder == Remainder::kBias) {
    c.flat("remainder_bias_Hd", op.remainder_bias_Hd, x_THd.cols(), op.v_THd.dtype);
    return;
  }
  c.matrix("v_THd", op.v_THd, x_THd.rows(), op.v_THd.cols());
  c.that(op.v_THd.cols() > 0 && op.v_THd.cols() % d == 0 && x_THd.cols() % op.v_THd.cols() == 0,
         "the heads of values divide those of the queries");
}

template <typename Op>
void check_softmax(const Check& c, const Op& op) {
  check_far(c, op);
  c.matrix("lse_HT", op.lse_HT, op.params.heads, op.q_THd.rows(), DType::kF32);
  c.that(op.bias.kind != PositionBias::kFire, "FIRE is not shared by ranks");
  c.that(op.far.keys == 0 || op.far.queries == 0 || op.distance >= op.q_THd.rows(),
         "the keys lie before the queries");
}

template <typename Op>
void check_softmax_limits(const Op& op, const Target& target) {
  check_attention_heads(Op::kName, op.q_THd, op.params.heads, target);
  if (op.bias.kind == PositionBias::kAlibi) check_alibi_heads(Op::kName, op.params.heads);
}

}  // namespace

void StickBreakingFarForward::check() const {
  check_sticks(Check(kName), *this);
}

void StickBreakingFarBackward::check() const {
  const Check c(kName);
  check_sticks(c, *this);
  c.matrix("w_HT", w_HT, params.heads, q_THd.rows(), DType::kF32);
}

void AddRemainder::check() const {
  const Check c(kName);
  c.matrix("o_THd", o_THd, o_THd.rows(), o_THd.cols(), DType::kF32);
  c.matrix("log2_rem_HT", log2_rem_HT, params.heads, o_THd.rows(), DType::kF32);
  check_receiver(c, *this, o_THd);
}

void RemainderGradient::check() const {
  const Check c(kName);
  c.matrix("w_HT", w_HT, params.heads, do_THd.rows(), DType::kF32);
  c.matrix("do_THd", do_THd, do_THd.rows(), do_THd.cols(), v_THd.dtype);
  check_receiver(c, *this, do_THd);
}

void AddRemainderBackward::check() const {
  const Check c(kName);
  const int64_t d = c.heads("do_THd", do_THd, do_THd.rows(), params.heads);
  c.matrix("log2_rem_HT", log2_rem_HT, params.heads, do_THd.rows(), DType::kF32);
  c.that(params.remainder != Remainder::kNone, "something receives the remainder");
  if (params.remainder == Remainder::kBias) {
    c.flat("dremainder_bias_Hd", dremainder_bias_Hd, do_THd.cols(), DType::kF32);
    return;
  }
  c.matrix("dv_THd", dv_THd, do_THd.rows(), dv_THd.cols(), DType::kF32);
  c.that(dv_THd.cols() > 0 && dv_THd.cols() % d == 0 && do_THd.cols() % dv_THd.cols() == 0,
         "the heads of values divide those of the queries");
}
Buffer AddRemainderBackward::scratch(const Stream& s) const {
  if (!on_cuda(s) || params.remainder != Remainder::kBias) return {};
  return token_partials(s, do_THd.cols());
}

void SoftmaxFarForward::check() const {
  check_softmax(Check(kName), *this);
}
void SoftmaxFarBackward::check() const {
  const Check c(kName);
  check_softmax(c, *this);
  c.same("o_THd", o_THd, q_THd);
}
void SoftmaxFarForward::check_limits(const Target& target) const {
  check_softmax_limits(*this, target);
}
void SoftmaxFarBackward::check_limits(const Target& target) const {
  check_softmax_limits(*this, target);
}

}  // namespace sbtrain::ops
