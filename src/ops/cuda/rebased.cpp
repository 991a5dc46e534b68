#include "ops/rebased.h"

#include "ops/cuda/context.h"

namespace sbtrain::ops::cuda {
namespace {

// What the op has of a problem: RebasedState has keys and values alone, RebasedForward no
// gradients.
template <typename Op>
kernels::Rebased problem(const Op& op, const RebasedScratch& scratch) {
  kernels::Rebased p{.tokens = static_cast<int>(op.k_THf.rows()),
                     .heads = op.params.heads,
                     .features = static_cast<int>(op.k_THf.cols() / op.params.heads),
                     .values = static_cast<int>(op.v_THe.cols() / op.params.heads),
                     .s = op.params.polynomial(),
                     .chunked = scratch.choice.chunked,
                     .k = op.k_THf,
                     .v = op.v_THe,
                     .scratch = scratch.buffer.tensor(),
                     .group = static_cast<int>(scratch.choice.heads)};
  if constexpr (requires { op.q_THf; }) {
    require(op.den_HT.contiguous(), "rebased attention: den has strided rows");
    p.cu_seqlens = op.sequences.cu_seqlens;
    p.positions = op.sequences.positions_T;
    p.sequences = static_cast<int>(op.sequences.count);
    p.q = op.q_THf;
    p.o = op.o_THe;
    p.den = op.den_HT;
  }
  if constexpr (requires { op.do_THe; }) {
    p.dout = op.do_THe;
    p.dq = op.dq_THf;
    p.dk = op.dk_THf;
    p.dv = op.dv_THe;
  }
  return p;
}

}  // namespace

void run(Cuda, Stream& s, const RebasedForward& op, const RebasedScratch& scratch) {
  kernels::rebased_forward(cuda_stream(s), problem(op, scratch));
}

void run(Cuda, Stream& s, const RebasedBackward& op, const RebasedScratch& scratch) {
  kernels::rebased_backward(cuda_stream(s), problem(op, scratch));
}

void run(Cuda, Stream& s, const RebasedState& op, const RebasedScratch& scratch) {
  kernels::rebased_state(cuda_stream(s), problem(op, scratch), op.state_Re);
}

}  // namespace sbtrain::ops::cuda
