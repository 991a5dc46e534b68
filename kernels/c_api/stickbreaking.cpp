// Stick-breaking attention behind the C interface.
#include "kernels/attention/stickbreaking.h"

#include "kernels/attention/stickbreaking_hopper.h"
#include "kernels/c_api/problem.h"

namespace sbtrain::c_api {
namespace {

using kernels::StickBreakingProblem;

// The kernels' own part of the workspace, and how they divide their work.
struct Plan : kernels::StickBackwardPlan {
  bool hopper = false;
};

Plan plan_of(const sbtrain_stickbreaking& x, const Device& device, bool gated, bool backward) {
  const int64_t group = x.heads / kv_heads(x);
  Plan plan;
  plan.hopper = has_hopper(device, x.tokens, x.head_dim);
  if (!backward) {
    if (plan.hopper) plan.bytes = kernels::stickbreaking_hopper_forward_scratch_bytes(x.tokens);
    return plan;
  }
  static_cast<kernels::StickBackwardPlan&>(plan) = kernels::stickbreaking_backward_plan(
      {.hopper = plan.hopper,
       .tokens = x.tokens,
       .heads = x.heads,
       .head_dim = x.head_dim,
       .max_seqlen = longest(x),
       .group = group,
       .gated = gated,
       .learned_remainder = x.remainder == SBTRAIN_REMAINDER_VECTOR});
  return plan;
}

void check(const sbtrain_stickbreaking& x, const Device& device) {
  check_shape(x, device);
  require_field(x.attend_current == 0 || x.attend_current == 1, "attend_current", x.attend_current,
                "0 or 1");
  require_field(x.skip_epsilon >= 0.0f && x.skip_epsilon < 1.0f, "skip_epsilon", x.skip_epsilon,
                "from 0 to below 1");
  require_field(x.remainder >= SBTRAIN_REMAINDER_NONE && x.remainder <= SBTRAIN_REMAINDER_VECTOR,
                "remainder", x.remainder, "one of SBTRAIN_REMAINDER_...");
}

void check_tensors_of(const sbtrain_stickbreaking& x, bool backward) {
  check_tensors(x, backward);
  check_pointer("log2_remainder", x.log2_remainder);
  check_pointer("stop", x.stop);
  check_remainder(x.remainder, x.remainder_vector);
  if (x.gate != nullptr) {
    require_field(x.gate_stride >= x.heads, "gate_stride", x.gate_stride, "at least heads");
  }
  if (!backward) return;
  if (x.gate != nullptr) {
    check_pointer("d_gate", x.d_gate);
    require_field(x.d_gate_stride >= x.heads, "d_gate_stride", x.d_gate_stride, "at least heads");
  }
  if (x.remainder == SBTRAIN_REMAINDER_VECTOR) {
    check_pointer("d_remainder_vector", x.d_remainder_vector);
  }
}

StickBreakingProblem problem(const sbtrain_stickbreaking& x, const kernels::Pack& pack) {
  auto p = problem_of<StickBreakingProblem>(x, pack);
  p.attend_current = x.attend_current != 0;
  p.remainder = static_cast<kernels::StickRemainder>(x.remainder);
  p.skip_epsilon = x.skip_epsilon;
  p.gate = x.gate, p.gate_stride = x.gate_stride;
  if (x.remainder == SBTRAIN_REMAINDER_VECTOR) {
    p.remainder_bias = static_cast<const bf16*>(x.remainder_vector);
  }
  p.log2_rem = x.log2_remainder;
  p.stop = x.stop;
  return p;
}

void forward(const sbtrain_stickbreaking& x) {
  const Device device = device_of(x.device, 0);
  check(x, device);
  if (x.tokens == 0) return;
  check_tensors_of(x, false);
  const Plan plan = plan_of(x, device, x.gate != nullptr, false);
  Workspace workspace(x.workspace);
  const kernels::Pack pack = pack_of(x, workspace);
  void* const scratch = workspace.take_bytes(plan.bytes);
  require_workspace(x.workspace, x.workspace_bytes, workspace.bytes());
  const CurrentDevice current(x.device);
  auto* const stream = static_cast<cudaStream_t>(x.stream);
  kernels::describe_pack(stream, pack);
  const StickBreakingProblem p = problem(x, pack);
  plan.hopper ? kernels::stickbreaking_forward_hopper(stream, p, scratch)
              : kernels::stickbreaking_forward(stream, p);
}

void backward(const sbtrain_stickbreaking& x) {
  const Device device = device_of(x.device, 0);
  check(x, device);
  if (x.tokens == 0) return;
  check_tensors_of(x, true);
  const Plan plan = plan_of(x, device, x.gate != nullptr, true);
  Workspace workspace(x.workspace);
  const kernels::Pack pack = pack_of(x, workspace);
  void* const scratch = workspace.take_bytes(plan.bytes);
  require_workspace(x.workspace, x.workspace_bytes, workspace.bytes());
  StickBreakingProblem p = problem(x, pack);
  p.drem = x.d_remainder;
  p.dgate = static_cast<bf16*>(x.d_gate), p.dgate_stride = x.d_gate_stride;
  p.dremainder_bias = x.d_remainder_vector;
  p.workspace = static_cast<float*>(scratch);
  p.workspace_heads = static_cast<int>(plan.heads);
  p.workspace_blocks = static_cast<int>(plan.blocks);
  p.workspace_tokens = static_cast<int>(plan.tokens);
  if (plan.key_sums > 0) p.key_sums = p.workspace + plan.key_sums / sizeof(float);
  const CurrentDevice current(x.device);
  auto* const stream = static_cast<cudaStream_t>(x.stream);
  kernels::describe_pack(stream, pack);
  plan.single_pass ? kernels::stickbreaking_backward_single_pass(stream, p)
  : plan.hopper    ? kernels::stickbreaking_backward_hopper(stream, p)
                   : kernels::stickbreaking_backward(stream, p);
  if (x.remainder == SBTRAIN_REMAINDER_VECTOR) {
    const size_t bytes = static_cast<size_t>(x.heads) * x.head_dim * sizeof(float);
    kernels::check_cuda("d_remainder_vector",
                        cudaMemsetAsync(x.d_remainder_vector, 0, bytes, stream));
    kernels::stickbreaking_remainder_vector(stream, p);
  }
}

uint64_t workspace_bytes(const sbtrain_stickbreaking& x, bool backward) {
  const Device device = device_of(x.device, x.compute_capability);
  check(x, device);
  Workspace workspace;
  pack_of(x, workspace);
  workspace.take_bytes(plan_of(x, device, x.gate != nullptr, backward).bytes);
  return workspace.bytes();
}

}  // namespace
}  // namespace sbtrain::c_api

using namespace sbtrain::c_api;

int sbtrain_stickbreaking_workspace(const sbtrain_stickbreaking* x, int backward, uint64_t* bytes) {
  return call([&] {
    check_pointer("bytes", bytes);
    *bytes = workspace_bytes(take(x), backward != 0);
  });
}
int sbtrain_stickbreaking_forward(const sbtrain_stickbreaking* x) {
  return call([&] { forward(take(x)); });
}
int sbtrain_stickbreaking_backward(const sbtrain_stickbreaking* x) {
  return call([&] { backward(take(x)); });
}
