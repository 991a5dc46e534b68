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
Problem queries_and_keys(const Op& op) {
  Problem p;
  p.tokens = static_cast<int>(op.q_THd.rows());
  p.heads = op.params.heads;
  p.group = queries_of_key(op.q_THd, op.k_THd);
  p.head_dim = static_cast<int>(op.q_THd.cols() / op.params.heads);
  p.scale = op.params.scale;
  p.q = head_rows(op.q_THd);
  p.k = head_rows(op.k_THd);
  p.v = head_rows(op.v_THd);
  return p;
}
template <typename Problem, typename Op>
Problem attention_problem(const Op& op) {
  auto p = queries_and_keys<Problem>(op);
  p.cu_seqlens = op.sequences.cu_seqlens;
  p.positions = op.sequences.positions_T;
  p.sequences = static_cast<int>(op.sequences.count);
  if constexpr (requires { op.o_THd; }) p.o = head_rows(op.o_THd);
  if constexpr (requires { op.do_THd; }) {
    p.dout = head_rows(op.do_THd);
    p.dq = head_rows(op.dq_THd);
    p.dk = head_rows(op.dk_THd);
    p.dv = head_rows(op.dv_THd);
  }
  return p;
}

// Rows of f32 to which kernels add two numbers at a time.
inline kernels::Matrix<float> sum_rows(const Tensor& t) {
  const kernels::Matrix<float> rows = t;
  require(reinterpret_cast<uintptr_t>(rows.data) % 8 == 0 && rows.stride % 2 == 0,
          "attention: sums of other ranks must begin at multiples of 8 bytes");
  return rows;
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
