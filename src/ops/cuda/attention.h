// What the launchers of attention kernels share.
#pragma once

#include "kernels/attention/alibi_slopes.h"
#include "kernels/attention/softmax.h"
#include "ops/attention.h"
#include "ops/cuda/context.h"

namespace sbtrain::ops::cuda {

inline kernels::HeadRows head_rows(const Tensor& t) {
  const kernels::HeadRows rows = t;
  require(reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 && rows.stride % 8 == 0,
          "attention: rows must begin at multiples of 16 bytes");
  return rows;
}

// What kernels::SoftmaxProblem and kernels::StickBreakingProblem have in common.
template <typename Problem, typename Op>
Problem attention_problem(const Op& op) {
  Problem p;
  p.tokens = static_cast<int>(op.q_THd.rows());
  p.heads = op.params.heads;
  p.group = queries_of_key(op.q_THd, op.k_THd);
  p.head_dim = static_cast<int>(op.q_THd.cols() / op.params.heads);
  p.scale = op.params.scale;
  p.cu_seqlens = op.sequences.cu_seqlens;
  p.positions = op.sequences.positions_T;
  p.sequences = static_cast<int>(op.sequences.count);
  p.q = head_rows(op.q_THd);
  p.k = head_rows(op.k_THd);
  p.v = head_rows(op.v_THd);
  if constexpr (requires { op.o_THd; }) p.o = head_rows(op.o_THd);
  if constexpr (requires { op.do_THd; }) {
    p.dout = head_rows(op.do_THd);
    p.dq = head_rows(op.dq_THd);
    p.dk = head_rows(op.dk_THd);
    p.dv = head_rows(op.dv_THd);
  }
  return p;
}

// Calls call() with what the kernels take of the op's bias: nothing without one, the slopes of
// ALiBi, or the parameters of FIRE and, in the backward pass, their gradients.
template <typename Op, typename Call>
void with_bias(const Op& op, const Call& call) {
  switch (op.bias.kind) {
    case PositionBias::kNone:
      return call();
    case PositionBias::kAlibi:
      return call(kernels::alibi_slopes(op.params.heads));
    case PositionBias::kFire:
      if constexpr (requires { op.dfire; }) {
        return call(kernels::FireParameters(op.bias.fire), kernels::FireGradients(op.dfire));
      } else {
        return call(kernels::FireParameters(op.bias.fire));
      }
  }
}

}  // namespace sbtrain::ops::cuda
