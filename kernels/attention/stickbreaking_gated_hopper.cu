// The backward pass of stick-breaking attention with gates for sm_90a.
#include "kernels/attention/launch_stickbreaking_hopper.cuh"

namespace sbtrain::kernels {
namespace {

constexpr const char* kName = "stickbreaking_backward";

// dgate of one head of each group.
void write_gate_gradients(cudaStream_t stream, const HopperBackwardArguments& x, int heads) {
  const dim3 grid(static_cast<unsigned>(ceil_div(x.p.tokens, kStickKeys)),
                  static_cast<unsigned>(heads / x.p.group));
  write_gate_gradients_kernel<<<grid, kStickKeys, 0, stream>>>(x);
  check_launch(kName);
}

template <typename Query, typename Key>
void launch_groups(cudaStream_t stream, const StickBreakingProblem& p) {
  HopperBackwardArguments x = backward_arguments(p);
  void* const scheduler = place_in_scratch(x);
  for (x.first_head = 0; x.first_head < p.heads; x.first_head += p.workspace_heads) {
    const int heads = std::min(p.heads - x.first_head, p.workspace_heads);
    prepare_gates(stream, x, heads);
    launch_query_gradient<Query>(stream, x, heads, scheduler);
    for_each_member(
        x, heads, [&] { launch_key_gradient<Key>(stream, x, heads, scheduler); },
        [&](float* sums, int64_t count) {
          check_cuda(kName, cudaMemsetAsync(sums, 0, static_cast<size_t>(count) * 4, stream));
        },
        [&] { write_gate_gradients(stream, x, heads); });
  }
}

void backward_of_groups(cudaStream_t stream, const StickBreakingProblem& p) {
  with_hopper_head_dim(kName, p.head_dim, [&](auto d) {
    if (p.tokens == 0) return;
    launch_groups<Gated<QueryGradientShape<d()>>, Gated<KeyGradientShape<d(), false, true>>>(stream,
                                                                                             p);
  });
}

}  // namespace

void stickbreaking_backward_gated(cudaStream_t stream, const StickBreakingProblem& p) {
  if (by_member(p)) return backward_of_groups(stream, p);
  launch_backward_of<Gated>(stream, p);
}

}  // namespace sbtrain::kernels
