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

// Calls call() with the slopes of ALiBi, or without.
template <typename Op, typename Call>
void with_slopes(const Op& op, const Call& call) {
  if (op.bias.kind == PositionBias::kAlibi) return call(kernels::alibi_slopes(op.params.heads));
  call();
}

}  // namespace

void run(Cuda, Stream& s, const SoftmaxFarForward& op, const AttentionScratch& scratch) {
  kernels::SoftmaxFarProblem p = far_problem(op);
  p.o_sum = sum_rows(op.o_THd);
  with_slopes(op, [&](const auto&... slopes) {
    if (scratch.choice.implementation == Implementation::kHopper) {
      kernels::softmax_far_forward_hopper(cuda_stream(s), p, scratch.buffer.tensor().data,
                                          slopes...);
    } else {
      kernels::softmax_far_forward(cuda_stream(s), p, slopes...);
    }
  });
}

void run(Cuda, Stream& s, const SoftmaxFarBackward& op, const AttentionScratch& scratch) {
  kernels::SoftmaxFarProblem p = far_problem(op);
  p.o = head_rows(op.o_THd);
  p.dout = head_rows(op.do_THd);
  p.dq_sum = sum_rows(op.dq_THd);
  p.dk_sum = sum_rows(op.dk_THd);
  p.dv_sum = sum_rows(op.dv_THd);
  void* const delta = scratch.buffer.tensor().data;
  void* const scheduler = static_cast<std::byte*>(delta) + scratch.choice.hopper_part;
  with_slopes(op, [&](const auto&... slopes) {
    if (scratch.choice.implementation == Implementation::kHopper) {
      kernels::softmax_far_backward_hopper(cuda_stream(s), p, delta, scheduler, slopes...);
    } else {
      kernels::softmax_far_backward(cuda_stream(s), p, delta, slopes...);
    }
  });
}

}  // namespace sbtrain::ops::cuda
