// Softmax attention to the keys of other ranks: launches kernels/attention/softmax_far.h.
#include "ops/far_softmax.h"

#include "kernels/attention/softmax_far.h"
#include "ops/cuda/attention.h"

namespace sbtrain::ops::cuda {
namespace {

template <typename Op>
kernels::SoftmaxFarProblem far_problem(const Op& op) {
  require(op.lse_HT.contiguous(), "softmax attention: lse_HT has strided rows");
  auto p = queries_and_keys<kernels::SoftmaxFarProblem>(op);
  p.window = static_cast<int>(op.params.window);
  p.lse = op.lse_HT;
  p.queries = static_cast<int>(op.far.queries);
  p.first_key = static_cast<int>(op.q_THd.rows() - op.far.keys);
  p.distance = static_cast<int>(op.distance);
  return p;
}

}  // namespace

void run(Cuda, Stream& s, const SoftmaxFarForward& op, const Buffer& /*scratch*/) {
  kernels::SoftmaxFarProblem p = far_problem(op);
  p.o_sum = sum_rows(op.o_THd);
  if (op.bias.kind == PositionBias::kAlibi) {
    kernels::softmax_far_forward(cuda_stream(s), p, kernels::alibi_slopes(p.heads));
  } else {
    kernels::softmax_far_forward(cuda_stream(s), p);
  }
}

void run(Cuda, Stream& s, const SoftmaxFarBackward& op, const Buffer& scratch) {
  kernels::SoftmaxFarProblem p = far_problem(op);
  p.o = head_rows(op.o_THd);
  p.dout = head_rows(op.do_THd);
  p.dq_sum = sum_rows(op.dq_THd);
  p.dk_sum = sum_rows(op.dk_THd);
  p.dv_sum = sum_rows(op.dv_THd);
  if (op.bias.kind == PositionBias::kAlibi) {
    kernels::softmax_far_backward(cuda_stream(s), p, scratch.tensor().data,
                                  kernels::alibi_slopes(p.heads));
  } else {
    kernels::softmax_far_backward(cuda_stream(s), p, scratch.tensor().data);
  }
}

}  // namespace sbtrain::ops::cuda
