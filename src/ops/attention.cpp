// Checks and scratch of attention.
#include "ops/attention.h"

#include "kernels/attention/alibi_slopes.h"
#include "kernels/scratch_sizes.h"
#include "ops/attention_checks.h"

namespace sbtrain::ops {
namespace {

// The checks that all passes over a pack share.
template <typename Op>
void check_pack(const Check& c, const Op& op) {
  check_queries_and_keys(c, op);
  c.documents(op.sequences, op.q_THd.rows());
  if constexpr (requires { op.o_THd; }) c.same("o_THd", op.o_THd, op.q_THd);
  if constexpr (requires { op.do_THd; }) {
    c.same("dq_THd", op.dq_THd, op.q_THd);
    c.same("dk_THd", op.dk_THd, op.k_THd);
    c.same("dv_THd", op.dv_THd, op.k_THd);
    c.same("do_THd", op.do_THd, op.q_THd);
  }
}

template <typename Op>
void check_stickbreaking(const Check& c, const Op& op) {
  check_pack(c, op);
  const int64_t tokens = op.q_THd.rows();
  const int heads = op.params.heads;
  c.matrix("log2_rem_HT", op.log2_rem_HT, heads, tokens, DType::kF32);
  c.matrix("stop_HT", op.stop_HT, heads, tokens, DType::kI32);
  if (op.gate_TH.defined()) c.matrix("gate_TH", op.gate_TH, tokens, heads, DType::kF32);
  if (op.params.remainder == Remainder::kBias) {
    c.flat("remainder_bias_Hd", op.remainder_bias_Hd, op.q_THd.cols(), op.q_THd.dtype);
  }
}

void check_fire(const Check& c, const FireTensors& fire, int64_t heads, DType dtype) {
  c.flat("c_1", fire.c_1, 1, dtype);
  c.flat("m_1", fire.m_1, 1, dtype);
  c.flat("w1_K", fire.w1_K, kFireHidden, dtype);
  c.flat("b1_K", fire.b1_K, kFireHidden, dtype);
  c.flat("w2_HK", fire.w2_HK, heads * kFireHidden, dtype);
  c.flat("b2_H", fire.b2_H, heads, dtype);
}

template <typename Op>
void check_softmax(const Check& c, const Op& op) {
  check_pack(c, op);
  c.matrix("lse_HT", op.lse_HT, op.params.heads, op.q_THd.rows(), DType::kF32);
  if (op.bias.kind == PositionBias::kFire) {
    check_fire(c, op.bias.fire, op.params.heads, op.q_THd.dtype);
  }
}

template <typename Op>
void check_softmax_limits(const Op& op, const Target& target) {
  check_attention_heads(Op::kName, op.q_THd, op.params.heads, target);
  if (op.bias.kind == PositionBias::kAlibi) check_alibi_heads(Op::kName, op.params.heads);
}

template <typename Op>
void check_decode(const Check& c, const Op& op) {
  const int64_t sequences = op.q_BHd.rows();
  const int64_t d = c.heads("q_BHd", op.q_BHd, sequences, op.params.heads);
  c.same("o_BHd", op.o_BHd, op.q_BHd);
  c.that(op.k_cache_BCGd.rank == 3 && op.v_cache_BCGd.rank == 3, "caches have three dimensions");
  const auto& shape = op.k_cache_BCGd.shape;
  c.that(shape[2] > 0 && shape[2] % d == 0 && op.q_BHd.cols() % shape[2] == 0,
         "the heads of the cache divide those of the queries");
  c.flat("k_cache_BCGd", op.k_cache_BCGd, sequences * shape[1] * shape[2], op.q_BHd.dtype);
  c.that(op.v_cache_BCGd.shape == shape, "the caches have the same shape");
  c.flat("v_cache_BCGd", op.v_cache_BCGd, sequences * shape[1] * shape[2], op.q_BHd.dtype);
  c.flat("lengths_B", op.lengths_B, sequences, DType::kI32);
  c.that(op.k_BGd.defined() == op.v_BGd.defined(), "the token has a key and a value or neither");
  if (!op.k_BGd.defined()) return;
  c.matrix("k_BGd", op.k_BGd, sequences, shape[2], op.k_cache_BCGd.dtype);
  c.matrix("v_BGd", op.v_BGd, sequences, shape[2], op.v_cache_BCGd.dtype);
}

// On the CPU none: one thread computes a head.
template <typename Op>
Buffer decode_scratch(const Stream& s, const Op& op) {
  if (!on_cuda(s)) return {};
  const int64_t floats =
      kernels::decode_scratch_floats(op.q_BHd.rows(), op.params.heads,
                                     op.q_BHd.cols() / op.params.heads, op.k_cache_BCGd.shape[1]);
  if (floats == 0) return {};
  return s.scratch("parts of keys", DType::kF32, {floats});
}

}  // namespace

void StickBreakingForward::check() const {
  check_stickbreaking(Check(kName), *this);
}

void StickBreakingBackward::check() const {
  const Check c(kName);
  check_stickbreaking(c, *this);
  if (gate_TH.defined()) {
    c.matrix("dgate_TH", dgate_TH, gate_TH.rows(), gate_TH.cols(), q_THd.dtype);
  }
  if (drem_HT.defined()) c.matrix("drem_HT", drem_HT, params.heads, q_THd.rows(), DType::kF32);
  if (params.remainder == Remainder::kBias) {
    c.flat("dremainder_bias_Hd", dremainder_bias_Hd, q_THd.cols(), DType::kF32);
  }
}

float alibi_slope(int heads, int head) {
  return kernels::alibi_slope(heads, head);
}

void SoftmaxForward::check() const {
  check_softmax(Check(kName), *this);
}
void SoftmaxForward::check_limits(const Target& target) const {
  check_softmax_limits(*this, target);
}

void SoftmaxBackward::check() const {
  const Check c(kName);
  check_softmax(c, *this);
  if (bias.kind == PositionBias::kFire) check_fire(c, dfire, params.heads, DType::kF32);
}
void SoftmaxBackward::check_limits(const Target& target) const {
  check_softmax_limits(*this, target);
}

void StickBreakingDecode::check() const {
  const Check c(kName);
  check_decode(c, *this);
  if (gate_cache_BCH.defined()) {
    c.flat("gate_cache_BCH", gate_cache_BCH, q_BHd.rows() * k_cache_BCGd.shape[1] * params.heads,
           DType::kF32);
  }
  if (params.remainder == Remainder::kBias) {
    c.flat("remainder_bias_Hd", remainder_bias_Hd, q_BHd.cols(), q_BHd.dtype);
  }
}
Buffer StickBreakingDecode::scratch(const Stream& s) const {
  return decode_scratch(s, *this);
}

void SoftmaxDecode::check() const {
  const Check c(kName);
  check_decode(c, *this);
  if (bias.kind == PositionBias::kFire) check_fire(c, bias.fire, params.heads, q_BHd.dtype);
}
void SoftmaxDecode::check_limits(const Target& /*target*/) const {
  check_decode_heads(kName, q_BHd, params.heads);
  if (bias.kind == PositionBias::kAlibi) check_alibi_heads(kName, params.heads);
}

Buffer SoftmaxDecode::scratch(const Stream& s) const {
  return decode_scratch(s, *this);
}

void CacheAppend::check() const {
  const Check c(kName);
  c.that(cache_BCN.rank == 3 && cache_BCN.contiguous(), "the cache has three dimensions");
  c.matrix("x_BN", x_BN, cache_BCN.shape[0], cache_BCN.shape[2], cache_BCN.dtype);
  c.flat("positions_B", positions_B, x_BN.rows(), DType::kI32);
}

}  // namespace sbtrain::ops
