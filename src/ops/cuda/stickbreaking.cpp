// Stick-breaking attention: launches kernels/attention/stickbreaking.h.
#include "kernels/attention/stickbreaking.h"

#include "core/error.h"
#include "ops/cuda/attention.h"
#include "ops/cuda/context.h"
#include "ops/cuda/cuda.h"
#include "ops/cuda/scratch.h"

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

template <typename Tensors>
kernels::StickBreakingProblem problem(const Tensors& t, const Sequences& sequences,
                                      const StickBreakingParams& params) {
  require(t.log2_rem_HT.contiguous() && t.stop_HT.contiguous(),
          "stick-breaking attention: the remainders have strided rows");
  kernels::StickBreakingProblem p{
      .tokens = static_cast<int>(t.q_THd.rows()),
      .heads = params.heads,
      .head_dim = attention_head_dim("stick-breaking attention", t.q_THd, params.heads),
      .scale = params.scale,
      .attend_current = params.attend_current,
      .remainder = remainder_of(params.remainder),
      .skip_epsilon = params.skip_epsilon,
      .cu_seqlens = sequences.cu_seqlens.i32(),
      .positions = sequences.positions_T.i32(),
      .sequences = static_cast<int>(sequences.count),
      .q = head_rows(t.q_THd),
      .k = head_rows(t.k_THd),
      .v = head_rows(t.v_THd),
      .log2_rem = t.log2_rem_HT.f32(),
      .stop = t.stop_HT.i32(),
  };
  if (t.gate_TH.defined()) {
    p.gate = t.gate_TH.f32();
    p.gate_stride = t.gate_TH.row_stride;
  }
  if (params.remainder == Remainder::kBias) {
    p.remainder_bias = reinterpret_cast<const __nv_bfloat16*>(t.remainder_bias_Hd.bf16());
  }
  return p;
}

}  // namespace

void stickbreaking_forward(Stream& s, const StickBreakingForward& t, const Sequences& sequences,
                           const StickBreakingParams& params) {
  kernels::StickBreakingProblem p = problem(t, sequences, params);
  p.o = head_rows(t.o_THd);
  kernels::stickbreaking_forward(cuda_stream(s), p);
}

void stickbreaking_backward(Stream& s, const StickBreakingBackward& t, const Sequences& sequences,
                            const StickBreakingParams& params) {
  const int64_t tokens = t.q_THd.rows();
  const Buffer states =
      stickbreaking_backward_scratch(s, tokens, params.heads, sequences.max_seqlen);
  const StickBreakingWorkspace shape =
      stickbreaking_workspace(tokens, params.heads, sequences.max_seqlen);
  kernels::StickBreakingProblem p = problem(t, sequences, params);
  p.dout = head_rows(t.do_THd);
  p.dq = head_rows(t.dq_THd);
  p.dk = head_rows(t.dk_THd);
  p.dv = head_rows(t.dv_THd);
  if (t.gate_TH.defined()) {
    p.dgate = reinterpret_cast<__nv_bfloat16*>(t.dgate_TH.bf16());
    p.dgate_stride = t.dgate_TH.row_stride;
  }
  if (params.remainder == Remainder::kBias) p.dremainder_bias = t.dremainder_bias_Hd.f32();
  p.workspace = states.tensor().f32();
  p.workspace_heads = static_cast<int>(shape.heads);
  p.workspace_blocks = static_cast<int>(shape.blocks);
  kernels::stickbreaking_backward(cuda_stream(s), p);
}

}  // namespace sbtrain::ops::cuda
