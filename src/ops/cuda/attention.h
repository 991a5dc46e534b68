// What the launchers of attention kernels share.
#pragma once

#include <string_view>

#include "core/error.h"
#include "kernels/attention/softmax.h"
#include "ops/ops.h"

namespace sbtrain::ops::cuda {

inline kernels::HeadRows head_rows(const Tensor& t) {
  auto* const data = reinterpret_cast<__nv_bfloat16*>(t.bf16());
  require(reinterpret_cast<uintptr_t>(data) % 16 == 0 && t.row_stride % 8 == 0,
          "attention: rows must begin at multiples of 16 bytes");
  return {data, t.row_stride};
}

inline int attention_head_dim(std::string_view what, const Tensor& q_THd, int heads) {
  const int64_t head_dim = q_THd.cols() / heads;
  if (head_dim > 128 || head_dim % 8 != 0) {
    fail(ExitCode::kConfig,
         "{} on CUDA: the head dimension is {} (model.width / model.heads), not a multiple of 8 "
         "up to 128",
         what, head_dim);
  }
  return static_cast<int>(head_dim);
}

template <typename Tensors>
kernels::SoftmaxProblem softmax_problem(const Tensors& t, const Sequences& sequences,
                                        const SoftmaxParams& params) {
  const int head_dim = attention_head_dim("softmax attention", t.q_THd, params.heads);
  require(t.lse_HT.contiguous(), "softmax attention: lse has strided rows");
  return {.tokens = static_cast<int>(t.q_THd.rows()),
          .heads = params.heads,
          .head_dim = head_dim,
          .scale = params.scale,
          .window = static_cast<int>(params.window),
          .cu_seqlens = sequences.cu_seqlens.i32(),
          .positions = sequences.positions_T.i32(),
          .sequences = static_cast<int>(sequences.count),
          .max_seqlen = static_cast<int>(sequences.max_seqlen),
          .q = head_rows(t.q_THd),
          .k = head_rows(t.k_THd),
          .v = head_rows(t.v_THd),
          .o = head_rows(t.o_THd),
          .lse = t.lse_HT.f32()};
}
inline kernels::SoftmaxProblem softmax_backward_problem(const SoftmaxBackward& t,
                                                        const Sequences& sequences,
                                                        const SoftmaxParams& params) {
  kernels::SoftmaxProblem p = softmax_problem(t, sequences, params);
  p.dout = head_rows(t.do_THd);
  p.dq = head_rows(t.dq_THd);
  p.dk = head_rows(t.dk_THd);
  p.dv = head_rows(t.dv_THd);
  return p;
}

}  // namespace sbtrain::ops::cuda
