// Stick-breaking attention: launches kernels/attention/stickbreaking.h or stickbreaking_hopper.h.
#include "kernels/attention/stickbreaking_hopper.h"
#include "kernels/attention/stickbreaking_remainder.h"
#include "ops/cuda/attention.h"
#include "ops/far_keys.h"

namespace sbtrain::ops::cuda {
namespace {

template <typename Op>
kernels::StickBreakingProblem problem(const Op& op) {
  require(op.log2_rem_HT.contiguous() && op.stop_HT.contiguous(),
          "stick-breaking attention: the remainders have strided rows");
  auto p = attention_problem<kernels::StickBreakingProblem>(op);
  p.query_factor = op.params.query_factor;
  p.attend_current = op.params.attend_current;
  p.remainder = op.params.remainder;
  p.skip_epsilon = op.params.skip_epsilon;
  p.log2_rem = op.log2_rem_HT;
  p.stop = op.stop_HT;
  p.gate = op.gate_TH;
  p.gate_stride = op.gate_TH.row_stride;
  if (op.params.remainder == Remainder::kBias) p.remainder_bias = op.remainder_bias_Hd;
  return p;
}

template <typename Op>
kernels::StickBreakingProblem far_problem(const Op& op) {
  require(op.before_HT.contiguous() && op.log2_rem_HT.contiguous() && op.stop_HT.contiguous(),
          "stick-breaking attention: the remainders have strided rows");
  kernels::StickBreakingProblem p = queries_and_keys<kernels::StickBreakingProblem>(op);
  p.query_factor = op.params.query_factor;
  p.skip_epsilon = op.params.skip_epsilon;
  p.log2_rem = op.log2_rem_HT;
  p.stop = op.stop_HT;
  p.far.queries = static_cast<int>(op.far.queries);
  p.far.key = static_cast<int>(op.q_THd.rows() - op.far.keys);
  p.far.before = op.before_HT;
  p.gate = op.gate_TH;
  p.gate_stride = op.gate_TH.row_stride;
  return p;
}

// Of what receives the remainder of x_THd, the output or its gradient.
template <typename Op>
kernels::StickBreakingProblem receiver_problem(const Op& op, const Tensor& x_THd) {
  kernels::StickBreakingProblem p;
  p.tokens = static_cast<int>(x_THd.rows());
  p.heads = op.params.heads;
  p.head_dim = static_cast<int>(x_THd.cols() / op.params.heads);
  p.remainder = op.params.remainder;
  if constexpr (requires { op.v_THd; }) {
    if (p.remainder == Remainder::kBias) {
      p.remainder_bias = op.remainder_bias_Hd;
    } else {
      p.group = queries_of_key(x_THd, op.v_THd);
      p.v = head_rows(op.v_THd);
    }
  }
  if constexpr (requires { op.log2_rem_HT; }) {
    require(op.log2_rem_HT.contiguous(), "{}: log2_rem_HT has strided rows", Op::kName);
    p.log2_rem = op.log2_rem_HT;
  }
  if constexpr (requires { op.do_THd; }) p.dout = head_rows(op.do_THd);
  return p;
}

}  // namespace

void run(Cuda, Stream& s, const StickBreakingForward& op, const AttentionScratch& scratch) {
  if (scratch.choice.implementation == Implementation::kHopper) {
    kernels::stickbreaking_forward_hopper(cuda_stream(s), problem(op),
                                          scratch.buffer.tensor().data);
  } else {
    kernels::stickbreaking_forward(cuda_stream(s), problem(op));
  }
}

void run(Cuda, Stream& s, const StickBreakingBackward& op, const AttentionScratch& scratch) {
  const AttentionChoice& choice = scratch.choice;
  kernels::StickBreakingProblem p = problem(op);
  if (op.gate_TH.defined()) {
    p.dgate = op.dgate_TH;
    p.dgate_stride = op.dgate_TH.row_stride;
  }
  if (op.drem_HT.defined()) {
    require(op.drem_HT.dtype == DType::kF32 && op.drem_HT.contiguous(),
            "stickbreaking_backward: drem_HT is not f32 without gaps between its rows");
    p.drem = op.drem_HT;
  }
  if (op.params.remainder == Remainder::kBias) p.dremainder_bias = op.dremainder_bias_Hd;
  p.workspace = scratch.buffer.tensor();
  p.workspace_heads = static_cast<int>(choice.heads);
  p.workspace_blocks = static_cast<int>(choice.blocks);
  p.workspace_tokens = static_cast<int>(choice.tokens);
  if (choice.key_sums > 0) p.key_sums = p.workspace + choice.key_sums / sizeof(float);
  if (choice.single_pass) {
    kernels::stickbreaking_backward_single_pass(cuda_stream(s), p);
  } else if (choice.implementation == Implementation::kHopper) {
    kernels::stickbreaking_backward_hopper(cuda_stream(s), p);
  } else {
    kernels::stickbreaking_backward(cuda_stream(s), p);
  }
  if (op.params.remainder == Remainder::kBias) {
    kernels::stickbreaking_remainder_vector(cuda_stream(s), p);
  }
}

void run(Cuda, Stream& s, const StickBreakingFarForward& op, const AttentionScratch& scratch) {
  kernels::StickBreakingProblem p = far_problem(op);
  p.far.o = sum_rows(op.o_THd);
  if (scratch.choice.implementation == Implementation::kHopper) {
    kernels::stickbreaking_far_forward_hopper(cuda_stream(s), p, scratch.buffer.tensor().data);
  } else {
    kernels::stickbreaking_far_forward(cuda_stream(s), p);
  }
}

void run(Cuda, Stream& s, const StickBreakingFarBackward& op, const AttentionScratch& scratch) {
  require(op.w_HT.contiguous(), "stickbreaking_far_backward: w_HT has strided rows");
  kernels::StickBreakingProblem p = far_problem(op);
  p.dout = head_rows(op.do_THd);
  p.far.w = op.w_HT;
  p.far.dq = sum_rows(op.dq_THd);
  p.far.dk = sum_rows(op.dk_THd);
  p.far.dv = sum_rows(op.dv_THd);
  if (op.gate_TH.defined()) p.far.dgate = op.dgate_TH;
  p.workspace = scratch.buffer.tensor();
  p.workspace_heads = static_cast<int>(scratch.choice.heads);
  p.workspace_blocks = static_cast<int>(scratch.choice.blocks);
  p.workspace_tokens = static_cast<int>(scratch.choice.tokens);
  if (scratch.choice.single_pass) {
    kernels::stickbreaking_far_backward_single_pass(cuda_stream(s), p);
  } else if (scratch.choice.implementation == Implementation::kHopper) {
    kernels::stickbreaking_far_backward_hopper(cuda_stream(s), p);
  } else {
    kernels::stickbreaking_far_backward(cuda_stream(s), p);
  }
}

void run(Cuda, Stream& s, const AddRemainder& op) {
  kernels::StickBreakingProblem p = receiver_problem(op, op.o_THd);
  p.far.o = sum_rows(op.o_THd);
  kernels::stickbreaking_add_remainder(cuda_stream(s), p);
}

void run(Cuda, Stream& s, const RemainderGradient& op) {
  require(op.w_HT.contiguous(), "remainder_gradient: w_HT has strided rows");
  kernels::StickBreakingProblem p = receiver_problem(op, op.do_THd);
  p.far.w = op.w_HT;
  kernels::stickbreaking_remainder_gradient(cuda_stream(s), p);
}

void run(Cuda, Stream& s, const AddRemainderBackward& op, const Buffer& scratch) {
  kernels::StickBreakingProblem p = receiver_problem(op, op.do_THd);
  if (op.params.remainder == Remainder::kBias) {
    p.workspace = scratch.tensor();
    p.dremainder_bias = op.dremainder_bias_Hd;
    return kernels::stickbreaking_remainder_vector(cuda_stream(s), p);
  }
  p.group = queries_of_key(op.do_THd, op.dv_THd);
  p.far.dv = sum_rows(op.dv_THd);
  kernels::stickbreaking_remainder_values(cuda_stream(s), p);
}

}  // namespace sbtrain::ops::cuda
