// The stick-breaking backward pass for sm_90a where the states of a head do not fit.
#include "kernels/attention/launch_stickbreaking_hopper.cuh"

namespace sbtrain::kernels {
namespace {

template <typename Query, typename Key>
void backward(cudaStream_t stream, const StickBreakingProblem& p) {
  HopperBackwardArguments x = backward_arguments(p);
  void* const scheduler = place_in_scratch(x);
  for (x.first_head = 0; x.first_head < p.heads; ++x.first_head) {
    for_each_segment(
        x,
        [&](int queries, int keys) {
          launch_backward<Query, Key>(stream, x, queries, keys, 1, scheduler);
        },
        [&](float* sums, int64_t count) {
          check_cuda("stickbreaking_backward",
                     cudaMemsetAsync(sums, 0, static_cast<size_t>(count) * sizeof(float), stream));
        });
  }
}

}  // namespace

void stickbreaking_backward_in_segments(cudaStream_t stream, const StickBreakingProblem& p) {
  with_hopper_head_dim("stickbreaking_backward", p.head_dim, [&](auto d) {
    backward<QueryGradientShape<d(), false, true>, KeyGradientShape<d(), false, true>>(stream, p);
  });
}

}  // namespace sbtrain::kernels
