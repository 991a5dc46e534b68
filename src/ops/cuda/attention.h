// What the launchers of attention kernels share.
#pragma once

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

}  // namespace sbtrain::ops::cuda
