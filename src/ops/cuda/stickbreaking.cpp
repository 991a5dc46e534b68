// Stick-breaking attention: launches kernels/attention/stickbreaking.h or stickbreaking_hopper.h.
#include "kernels/attention/stickbreaking.h"

#include "kernels/attention/stickbreaking_hopper.h"
#include "ops/choose.h"
#include "ops/cuda/attention.h"

namespace sbtrain::ops::cuda {
namespace {

kernels::StickRemainder remainder_of(Remainder remainder) {
  switch (remainder) {
    case Remainder::kNone:
      return kernels::StickRemainder::kNone;
    case Remainder::kValue:
      return kernels::StickRemainder::kValue;
    case Remainder::kBias:
      return kernels::StickRemainder::kBias;
  }
  return kernels::StickRemainder::kNone;
}

template <typename Op>
kernels::StickBreakingProblem problem(const Op& op) {
  require(op.log2_rem_HT.contiguous() && op.stop_HT.contiguous(),
          "stick-breaking attention: the remainders have strided rows");
  auto p = attention_problem<kernels::StickBreakingProblem>(op);
  p.attend_current = op.params.attend_current;
  p.remainder = remainder_of(op.params.remainder);
  p.skip_epsilon = op.params.skip_epsilon;
  p.log2_rem = arg(op.log2_rem_HT);
  p.stop = arg(op.stop_HT);
  p.gate = arg(op.gate_TH);
  p.gate_stride = op.gate_TH.row_stride;
  if (op.params.remainder == Remainder::kBias) p.remainder_bias = arg(op.remainder_bias_Hd);
  return p;
}

}  // namespace

void run(Cuda, Stream& s, const StickBreakingForward& op, const Buffer& scratch) {
  if (choose(op, s).implementation == Implementation::kHopper) {
    kernels::stickbreaking_forward_hopper(cuda_stream(s), problem(op),
                                          scratch.tensor().data);
  } else {
    kernels::stickbreaking_forward(cuda_stream(s), problem(op));
  }
}

void run(Cuda, Stream& s, const StickBreakingBackward& op, const Buffer& scratch) {
  const StickBreakingChoice choice = choose(op, s);
  kernels::StickBreakingProblem p = problem(op);
  if (op.gate_TH.defined()) {
    p.dgate = arg(op.dgate_TH);
    p.dgate_stride = op.dgate_TH.row_stride;
  }
  if (op.params.remainder == Remainder::kBias) p.dremainder_bias = arg(op.dremainder_bias_Hd);
  p.workspace = arg(scratch);
  p.workspace_heads = static_cast<int>(choice.heads);
  p.workspace_blocks = static_cast<int>(choice.blocks);
  if (choice.implementation == Implementation::kHopper) {
    void* rest = scratch.tensor().f32() + choice.states / sizeof(float);
    kernels::stickbreaking_backward_hopper(cuda_stream(s), p, rest);
  } else {
    kernels::stickbreaking_backward(cuda_stream(s), p);
  }
  if (op.params.remainder == Remainder::kBias) {
    kernels::stickbreaking_remainder_vector(cuda_stream(s), p);
  }
}

}  // namespace sbtrain::ops::cuda
