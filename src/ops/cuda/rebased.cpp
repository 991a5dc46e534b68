#include "ops/rebased.h"

#include "ops/cuda/context.h"

namespace sbtrain::ops::cuda {
namespace {

// The sizes, keys, values and scratch, which every op but decoding takes.
template <typename Op>
kernels::Rebased problem(const Op& op, const RebasedScratch& scratch) {
  return {.tokens = static_cast<int>(op.k_THf.rows()),
          .heads = op.params.heads,
          .features = static_cast<int>(op.k_THf.cols() / op.params.heads),
          .values = static_cast<int>(op.v_THe.cols() / op.params.heads),
          .s = op.params.polynomial(),
          .chunked = scratch.choice.chunked,
          .k = op.k_THf,
          .v = op.v_THe,
          .scratch = scratch.buffer.tensor(),
          .group = static_cast<int>(scratch.choice.heads)};
}

template <typename Op>
kernels::Rebased attention(const Op& op, const RebasedScratch& scratch) {
  require(op.den_HT.contiguous(), "rebased attention: den has strided rows");
  kernels::Rebased p = problem(op, scratch);
  p.cu_seqlens = op.sequences.cu_seqlens;
  p.positions = op.sequences.positions_T;
  p.sequences = static_cast<int>(op.sequences.count);
  p.q = op.q_THf;
  p.o = op.o_THe;
  p.den = op.den_HT;
  return p;
}

}  // namespace

void run(Cuda, Stream& s, const RebasedForward& op, const RebasedScratch& scratch) {
  kernels::rebased_forward(cuda_stream(s), attention(op, scratch));
}

void run(Cuda, Stream& s, const RebasedBackward& op, const RebasedScratch& scratch) {
  kernels::Rebased p = attention(op, scratch);
  p.dout = op.do_THe;
  p.dq = op.dq_THf;
  p.dk = op.dk_THf;
  p.dv = op.dv_THe;
  kernels::rebased_backward(cuda_stream(s), p);
}

void run(Cuda, Stream& s, const RebasedState& op, const RebasedScratch& scratch) {
  kernels::rebased_state(cuda_stream(s), problem(op, scratch), op.state_Re);
}

}  // namespace sbtrain::ops::cuda
