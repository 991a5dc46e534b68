// Softmax attention behind the C interface.
#include "kernels/attention/softmax.h"

#include "kernels/attention/alibi_slopes.h"
#include "kernels/attention/hopper_shapes.h"
#include "kernels/attention/scratch_sizes.h"
#include "kernels/c_api/problem.h"

namespace sbtrain::c_api {
namespace {

using kernels::SoftmaxProblem;

bool faster_on_hopper(const sbtrain_softmax& x, bool backward) {
  switch (x.bias) {
    case SBTRAIN_BIAS_ALIBI:
      return kernels::alibi_is_faster_on_hopper(x.head_dim, longest(x));
    case SBTRAIN_BIAS_FIRE:
      return kernels::fire_is_faster_on_hopper(x.head_dim, longest(x), backward);
    default:
      return kernels::plain_is_faster_on_hopper(x.head_dim, longest(x), backward);
  }
}

struct Plan {
  bool hopper = false;
  size_t scratch = 0, scheduler = 0;  // bytes
};
Plan plan_of(const sbtrain_softmax& x, const Device& device, bool backward) {
  const bool in_groups = backward && x.bias != SBTRAIN_BIAS_NONE && kv_heads(x) != x.heads;
  Plan plan{.hopper = has_hopper(device, x.tokens, x.head_dim) && !in_groups &&
                      faster_on_hopper(x, backward)};
  if (x.bias == SBTRAIN_BIAS_FIRE) {
    plan.scratch = kernels::fire_scratch(x.tokens, x.heads, x.head_dim, longest(x), backward).bytes;
  } else if (backward) {
    plan.scratch = kernels::softmax_backward_scratch_bytes(x.tokens, x.heads);
  }
  if (plan.hopper) plan.scheduler = kernels::tile_scheduler_bytes(x.tokens);
  return plan;
}

void check(const sbtrain_softmax& x, const Device& device) {
  check_shape(x, device);
  check_bias(x);
  require_field(x.window <= INT_MAX, "window", x.window, "below 2^31");
}

kernels::FireGradients fire_gradients(cudaStream_t stream, const sbtrain_softmax& x) {
  const sbtrain_fire_gradients& d = x.d_fire;
  const auto zero = [&](const char* name, float* data, int64_t count) {
    check_pointer(name, data);
    kernels::check_cuda(name, cudaMemsetAsync(data, 0, static_cast<size_t>(count) * 4, stream));
  };
  zero("d_fire.c", d.c, 1);
  zero("d_fire.m", d.m, 1);
  zero("d_fire.w1", d.w1, kernels::kFireUnits);
  zero("d_fire.b1", d.b1, kernels::kFireUnits);
  zero("d_fire.w2", d.w2, int64_t{x.heads} * kernels::kFireUnits);
  return {d.c, d.m, d.w1, d.b1, d.w2};
}

template <typename... Bias>
void run_backward(const Plan& plan, cudaStream_t stream, const SoftmaxProblem& p, void* scratch,
                  void* scheduler, const Bias&... bias) {
  plan.hopper ? kernels::softmax_backward_hopper(stream, p, scratch, scheduler, bias...)
              : kernels::softmax_backward(stream, p, scratch, bias...);
}
template <typename... Bias>
void run_forward(const Plan& plan, cudaStream_t stream, const SoftmaxProblem& p, void* scratch,
                 void* scheduler, const Bias&... bias) {
  plan.hopper ? kernels::softmax_forward_hopper(stream, p, scratch, scheduler, bias...)
              : kernels::softmax_forward(stream, p, scratch, bias...);
}

void run(const sbtrain_softmax& x, bool backward) {
  const Device device = device_of(x.device, 0);
  check(x, device);
  if (x.tokens == 0) return;
  check_tensors(x, backward);
  if (backward) check_rows("o", x.o, int64_t{x.heads} * x.head_dim);
  check_pointer("lse", x.lse);
  const Plan plan = plan_of(x, device, backward);
  Workspace workspace(x.workspace);
  const kernels::Pack pack = pack_of(x, workspace);
  void* const scratch = workspace.take_bytes(plan.scratch);
  void* const scheduler = workspace.take_bytes(plan.scheduler);
  require_workspace(x.workspace, x.workspace_bytes, workspace.bytes());
  auto p = problem_of<SoftmaxProblem>(x, pack);
  p.window = static_cast<int>(x.window);
  p.max_seqlen = static_cast<int>(longest(x));
  p.lse = x.lse;
  const CurrentDevice current(x.device);
  auto* const stream = static_cast<cudaStream_t>(x.stream);
  kernels::describe_pack(stream, pack);
  const auto with = [&](const auto&... bias) {
    backward ? run_backward(plan, stream, p, scratch, scheduler, bias...)
             : run_forward(plan, stream, p, scratch, scheduler, bias...);
  };
  if (x.bias == SBTRAIN_BIAS_NONE) with();
  if (x.bias == SBTRAIN_BIAS_ALIBI) with(kernels::alibi_slopes(x.heads));
  if (x.bias == SBTRAIN_BIAS_FIRE) {
    const kernels::FireParameters fire = fire_parameters(x.fire);
    backward ? run_backward(plan, stream, p, scratch, scheduler, fire, fire_gradients(stream, x))
             : run_forward(plan, stream, p, scratch, scheduler, fire);
  }
}

uint64_t workspace_bytes(const sbtrain_softmax& x, bool backward) {
  const Device device = device_of(x.device, x.compute_capability);
  check(x, device);
  Workspace workspace;
  pack_of(x, workspace);
  const Plan plan = plan_of(x, device, backward);
  workspace.take_bytes(plan.scratch);
  workspace.take_bytes(plan.scheduler);
  return workspace.bytes();
}

}  // namespace
}  // namespace sbtrain::c_api

using namespace sbtrain::c_api;

int sbtrain_softmax_workspace(const sbtrain_softmax* x, int backward, uint64_t* bytes) {
  return call([&] {
    check_pointer("bytes", bytes);
    *bytes = workspace_bytes(take(x), backward != 0);
  });
}
int sbtrain_softmax_forward(const sbtrain_softmax* x) {
  return call([&] { run(take(x), false); });
}
int sbtrain_softmax_backward(const sbtrain_softmax* x) {
  return call([&] { run(take(x), true); });
}
