#include "kernels/attention/rebased.h"

#include "kernels/attention/rebased_index.h"
#include "ops/cuda/arguments.h"
#include "ops/cuda/context.h"
#include "ops/cuda/cuda.h"
#include "ops/cuda/scratch.h"

namespace sbtrain::ops::cuda {
namespace {

kernels::RebasedTensor matrix(const Tensor& t) {
  return {bf16(t), t.row_stride};
}

kernels::RebasedPolynomial polynomial(const RebasedParams& params) {
  return {.scale = params.scale,
          .constant = params.constant,
          .linear = params.linear,
          .square = params.square,
          .eps = params.eps};
}

// Sizes, keys, values and scratch: what every op but decoding takes.
kernels::Rebased problem(const Tensor& k_THf, const Tensor& v_THe, const RebasedParams& params,
                         const RebasedWorkspace& w, const Buffer& scratch) {
  return {.tokens = static_cast<int>(k_THf.rows()),
          .heads = params.heads,
          .features = static_cast<int>(k_THf.cols() / params.heads),
          .values = static_cast<int>(v_THe.cols() / params.heads),
          .s = polynomial(params),
          .chunked = w.chunked,
          .k = matrix(k_THf),
          .v = matrix(v_THe),
          .scratch = scratch.tensor().defined() ? scratch.tensor().f32() : nullptr,
          .group = static_cast<int>(w.heads)};
}

template <typename Tensors>
RebasedWorkspace workspace(const Tensors& t, const Sequences& sequences,
                           const RebasedParams& params) {
  return rebased_workspace(t.q_THf.rows(), t.q_THf.cols() / params.heads,
                           t.v_THe.cols() / params.heads, params, sequences.max_seqlen);
}

template <typename Tensors>
kernels::Rebased attention(const Tensors& t, const Sequences& sequences,
                           const RebasedParams& params, const RebasedWorkspace& w,
                           const Buffer& scratch) {
  require(t.den_HT.contiguous(), "rebased attention: den has strided rows");
  kernels::Rebased p = problem(t.k_THf, t.v_THe, params, w, scratch);
  p.cu_seqlens = sequences.cu_seqlens.i32();
  p.positions = sequences.positions_T.i32();
  p.sequences = static_cast<int>(sequences.count);
  p.q = matrix(t.q_THf);
  p.o = matrix(t.o_THe);
  p.den = t.den_HT.f32();
  return p;
}

}  // namespace

void rebased_forward(Stream& s, const RebasedForward& t, const Sequences& sequences,
                     const RebasedParams& params) {
  const RebasedWorkspace w = workspace(t, sequences, params);
  const Buffer scratch = rebased_forward_scratch(s, t.q_THf.rows(), w);
  kernels::rebased_forward(cuda_stream(s), attention(t, sequences, params, w, scratch));
}

void rebased_backward(Stream& s, const RebasedBackward& t, const Sequences& sequences,
                      const RebasedParams& params) {
  const RebasedWorkspace w = workspace(t, sequences, params);
  const Buffer scratch = rebased_backward_scratch(s, t.q_THf.rows(), params.heads, w);
  kernels::Rebased p = attention(t, sequences, params, w, scratch);
  p.dout = matrix(t.do_THe);
  p.dq = matrix(t.dq_THf);
  p.dk = matrix(t.dk_THf);
  p.dv = matrix(t.dv_THe);
  kernels::rebased_backward(cuda_stream(s), p);
}

void rebased_state(Stream& s, Tensor state_Re, Tensor k_THf, Tensor v_THe,
                   const RebasedParams& params) {
  const RebasedWorkspace w = rebased_state_workspace(k_THf.rows(), k_THf.cols() / params.heads,
                                                     v_THe.cols() / params.heads, params);
  const Buffer scratch = rebased_forward_scratch(s, k_THf.rows(), w);
  kernels::rebased_state(cuda_stream(s), problem(k_THf, v_THe, params, w, scratch), state_Re.f32());
}

void rebased_decode(Stream& s, const RebasedDecode& t, const RebasedParams& params) {
  check_rebased_heads(t.q_BHf.cols() / params.heads, t.v_BHe.cols() / params.heads);
  kernels::rebased_decode(cuda_stream(s),
                          {.batch = t.q_BHf.rows(),
                           .heads = params.heads,
                           .features = static_cast<int>(t.q_BHf.cols() / params.heads),
                           .values = static_cast<int>(t.v_BHe.cols() / params.heads),
                           .s = polynomial(params),
                           .o = matrix(t.o_BHe),
                           .q = matrix(t.q_BHf),
                           .k = matrix(t.k_BHf),
                           .v = matrix(t.v_BHe),
                           .state = t.state_BRe.f32(),
                           .positions = t.positions_B.i32()});
}

}  // namespace sbtrain::ops::cuda
