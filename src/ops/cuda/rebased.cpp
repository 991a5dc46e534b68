#include "kernels/attention/rebased.h"

#include "ops/choose.h"
#include "ops/cuda/arguments.h"
#include "ops/cuda/context.h"

namespace sbtrain::ops::cuda {
namespace {

kernels::RebasedPolynomial polynomial(const RebasedParams& params) {
  return {.scale = params.scale,
          .constant = params.constant,
          .linear = params.linear,
          .square = params.square,
          .eps = params.eps};
}

// The sizes, keys, values and scratch, which every op but decoding takes.
template <typename Op>
kernels::Rebased problem(const Stream& s, const Op& op, const Buffer& scratch) {
  const RebasedChoice choice = choose(op, s);
  return {.tokens = static_cast<int>(op.k_THf.rows()),
          .heads = op.params.heads,
          .features = static_cast<int>(op.k_THf.cols() / op.params.heads),
          .values = static_cast<int>(op.v_THe.cols() / op.params.heads),
          .s = polynomial(op.params),
          .chunked = choice.chunked,
          .k = arg(op.k_THf),
          .v = arg(op.v_THe),
          .scratch = arg(scratch),
          .group = static_cast<int>(choice.heads)};
}

template <typename Op>
kernels::Rebased attention(const Stream& s, const Op& op, const Buffer& scratch) {
  require(op.den_HT.contiguous(), "rebased attention: den has strided rows");
  kernels::Rebased p = problem(s, op, scratch);
  p.cu_seqlens = arg(op.sequences.cu_seqlens);
  p.positions = arg(op.sequences.positions_T);
  p.sequences = static_cast<int>(op.sequences.count);
  p.q = arg(op.q_THf);
  p.o = arg(op.o_THe);
  p.den = arg(op.den_HT);
  return p;
}

}  // namespace

void run(Cuda, Stream& s, const RebasedForward& op, const Buffer& scratch) {
  kernels::rebased_forward(cuda_stream(s), attention(s, op, scratch));
}

void run(Cuda, Stream& s, const RebasedBackward& op, const Buffer& scratch) {
  kernels::Rebased p = attention(s, op, scratch);
  p.dout = arg(op.do_THe);
  p.dq = arg(op.dq_THf);
  p.dk = arg(op.dk_THf);
  p.dv = arg(op.dv_THe);
  kernels::rebased_backward(cuda_stream(s), p);
}

void run(Cuda, Stream& s, const RebasedState& op, const Buffer& scratch) {
  kernels::rebased_state(cuda_stream(s), problem(s, op, scratch), arg(op.state_Re));
}

void run(Cuda, Stream& s, const RebasedDecode& op) {
  kernels::rebased_decode(cuda_stream(s),
                          {.batch = op.q_BHf.rows(),
                           .heads = op.params.heads,
                           .features = static_cast<int>(op.q_BHf.cols() / op.params.heads),
                           .values = static_cast<int>(op.v_BHe.cols() / op.params.heads),
                           .s = polynomial(op.params),
                           .o = arg(op.o_BHe),
                           .q = arg(op.q_BHf),
                           .k = arg(op.k_BHf),
                           .v = arg(op.v_BHe),
                           .state = arg(op.state_BRe),
                           .positions = arg(op.positions_B)});
}

}  // namespace sbtrain::ops::cuda
