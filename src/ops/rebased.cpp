// Checks of Based and ReBased attention.
#include "ops/rebased.h"

namespace sbtrain::ops {
namespace {

template <typename Op>
void check_pack(const Check& c, const Op& op) {
  const int64_t tokens = op.q_THf.rows();
  c.heads("q_THf", op.q_THf, tokens, op.params.heads);
  c.heads("v_THe", op.v_THe, tokens, op.params.heads, op.q_THf.dtype);
  c.same("k_THf", op.k_THf, op.q_THf);
  c.same("o_THe", op.o_THe, op.v_THe);
  c.matrix("den_HT", op.den_HT, op.params.heads, tokens, DType::kF32);
  c.documents(op.sequences, tokens);
}

}  // namespace

int64_t rebased_state_rows(int64_t features, const RebasedParams& params) {
  const bool lower = params.constant != 0.0f || params.linear != 0.0f;
  return features * (features + 1) / 2 + (lower ? 1 + features : 0);
}

void RebasedForward::check() const {
  check_pack(Check(kName), *this);
}

void RebasedBackward::check() const {
  const Check c(kName);
  check_pack(c, *this);
  c.same("dq_THf", dq_THf, q_THf);
  c.same("dk_THf", dk_THf, q_THf);
  c.same("dv_THe", dv_THe, v_THe);
  c.same("do_THe", do_THe, v_THe);
}

void RebasedState::check() const {
  const Check c(kName);
  const int64_t f = c.heads("k_THf", k_THf, k_THf.rows(), params.heads);
  const int64_t e = c.heads("v_THe", v_THe, k_THf.rows(), params.heads, k_THf.dtype);
  c.flat("state_Re", state_Re, params.heads * rebased_state_rows(f, params) * (e + 1), DType::kF32);
}

void RebasedDecode::check() const {
  const Check c(kName);
  const int64_t sequences = q_BHf.rows();
  const int64_t f = c.heads("q_BHf", q_BHf, sequences, params.heads);
  const int64_t e = c.heads("v_BHe", v_BHe, sequences, params.heads, q_BHf.dtype);
  c.same("k_BHf", k_BHf, q_BHf);
  c.same("o_BHe", o_BHe, v_BHe);
  c.flat("state_BRe", state_BRe, sequences * params.heads * rebased_state_rows(f, params) * (e + 1),
         DType::kF32);
  c.flat("positions_B", positions_B, sequences, DType::kI32);
}

}  // namespace sbtrain::ops
